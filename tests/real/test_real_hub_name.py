"""The README's first commands, as they stand there, with the model by its Hub name from the Hub's cache, without a network."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.align import run_align
from tests.real.conftest import HUB_NAME
from tests.real_model import ROOT

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]
LINES = re.findall(r"^align (init --data [^#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the files that the lines name."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["question"]}) + "\n" for row in ROWS))
    (work / "rewards.py").write_text(
        "def three_sentences(completions, **kwargs):\n    return [float(text.count('.') == 3) for text in completions]\n"
    )
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def model_in_cache(hub_cache: dict[str, Any], folder: Path) -> Any:
    """``command("init", …)`` where the Hub's cache has the model."""

    def command(*words: str) -> dict[str, Any]:
        return run_align(folder / "home", *words, **hub_cache)

    return command


def test_a_recipe_for_demonstrations_is_written_and_checked(real_model: Path, model_in_cache: Any) -> None:
    """`transformers` counts 134,515,008 parameters, of which 61 norms of 576 are left out here, and the tokens of a row; its
    template has a line break behind the last end of a turn, which is no target."""
    outcome = model_in_cache(*shlex.split(LINES[0]))
    assert (outcome["status"], outcome["method"], outcome["warnings"]) == ("written", "sft", [])
    assert outcome["model"]["name"] == HUB_NAME
    assert (outcome["model"]["parameters"], outcome["model"]["context"]) == (134_515_008 - 61 * 576, 8192)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    chats = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in ROWS
    ]
    lengths = [len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) - 1 for chat in chats]
    assert outcome["longest_row"] == max(lengths)
    assert model_in_cache("check", "recipe.yaml")["status"] == "checked"


def test_without_a_name_it_is_the_model_of_a_recipe_for_reward_functions(model_in_cache: Any) -> None:
    """The learning rate is one at which a model of 135M parameters was seen to learn."""
    outcome = model_in_cache(*shlex.split(LINES[1]))
    assert (outcome["status"], outcome["method"], outcome["warnings"]) == ("written", "rl", [])
    assert outcome["recipe"]["model"] == HUB_NAME
    assert outcome["recipe"]["rl"]["training"]["learning_rate"] == 5e-6
