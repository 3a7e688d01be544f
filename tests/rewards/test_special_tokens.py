"""The text for rewards and environments: special tokens only if configured, and never the end of a turn.

The expected texts are the encoded ones, written out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.data.completion_text import CompletionText, Texts, with_special_tokens
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import TurnEnd
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.execution.base import StageContext
from alignment_core.inference.completions import Completion, Completions
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.base import REFUSE_UNUSED
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.schemas import read_scores, rollout_schema, shard_rows, write_table
from alignment_core.stages import score
from tests.flows.test_compositions import EVALUATION, compose, composed

__all__ = ["composed"]

SOURCE = """
def thinks(prompt, completion, label):
    return float(completion == "<think>2+2</think>4")

def plain(prompt, completion, label):
    return float(completion == "2+24")

def group(rows):
    return [thinks("", row["completion"], None) for row in rows]

class Echo:
    def reset(self, prompt, label):
        return None
    def step(self, completion):
        return {"observation": completion, "reward": 0.0, "done": False}
"""
THOUGHT = "<think>2+2</think>4"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = byte_tokenizer("{% for m in messages %}<user>{{ m.content }}{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<end>"]})
    tokenizer.add_tokens(["<over>"])  # ends turns, too, but is not marked as special
    return tokenizer


def completion(tokenizer: Any, text: str, end: str = "<eos>") -> Completion:
    ids = np.array(tokenizer(text + end)["input_ids"], np.int32)
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop" if end else "length")


def prompt() -> dict[str, Any]:
    return {"prompt": "?", "label": "4", "task": None, "source": "p:1", "prompt_ids": [63]}


def episode(tokenizer: Any, *turns: tuple[str, str]) -> Episode:
    result = Episode(0, 0, 0, prompt(), most_tokens=1000)
    for text, end in turns:
        if result.turns:
            result.append_observation(tokenizer("<user>and?<think>")["input_ids"])
        result.append_turn(completion(tokenizer, text, end))
    return result


def rewarded(
    tokenizer: Any, rows: list[dict[str, Any]], *configs: dict[str, Any], turn_end: TurnEnd | None = None
) -> list[list[Any]]:
    opening = Opening("rl.rewards", ResourcesConfig(reward_timeout_seconds=60), tokenizer=tokenizer, turn_end=turn_end)
    with RewardSources([CHOICE.validate(config) for config in configs], opening) as sources:
        return sources(rows)


@pytest.mark.parametrize("end", ["<eos>", "<end>"])  # an end of turn that is not EOS, as ChatML has on a base model
def test_rewards_get_special_tokens_only_if_configured(file: Path, tokenizer: Any, end: str) -> None:
    shown = {"skip_special_tokens": False}
    configs: list[dict[str, Any]] = [
        {"verifier": f"{file}:plain"},
        {"verifier": f"{file}:thinks"},
        {"verifier": f"{file}:thinks", **shown},
        {"function": f"{file}:group", **shown},
    ]
    row = Rollout.of(episode(tokenizer, (THOUGHT, end)), CompletionText(tokenizer), "policy").row()
    assert rewarded(tokenizer, [row], *configs) == [[1.0], [0.0], [1.0], [1.0]]
    (sampled,) = shard_rows([prompt()], 0, [completion(tokenizer, THOUGHT, end)], CompletionText(tokenizer), "policy")
    assert rewarded(tokenizer, [sampled | {"group": 0}], *configs) == [[1.0], [0.0], [1.0], [1.0]]


def test_texts_that_were_decoded_where_they_were_sampled_are_not_decoded_again(file: Path, tokenizer: Any) -> None:
    known = replace(completion(tokenizer, "never decoded"), texts=Texts("2", THOUGHT))
    (sampled,) = Completions.of([known]).each()
    rollout = Rollout.of(_appended(sampled), CompletionText(tokenizer), "policy")
    assert rollout.completion_text == "2"
    configs: list[dict[str, Any]] = [
        {"verifier": f"{file}:thinks"},
        {"verifier": f"{file}:thinks", "skip_special_tokens": False},
    ]
    assert rewarded(tokenizer, [rollout.row()], *configs) == [[0.0], [1.0]]


def _appended(completion: Completion) -> Episode:
    result = Episode(0, 0, 0, prompt(), most_tokens=1000)
    result.append_turn(completion)
    return result


@pytest.mark.parametrize("stop", ["<over>", "</think>"], ids=["an added token", "a special token"])
def test_a_text_that_ended_a_completion_stays_in_it(file: Path, tokenizer: Any, stop: str) -> None:
    """`generation.stop` may be a token, such as the `</tool_call>` of Qwen, which ends no turn by itself."""
    (file.parent / "mine.py").write_text(
        f"def whole(prompt, completion, label):\n    return float(completion == '<think>2{stop}')\n"
    )
    config = {"verifier": f"{file}:whole", "skip_special_tokens": False}
    ends = Renderer(tokenizer).turn_end
    (row,) = shard_rows([prompt()], 0, [completion(tokenizer, "<think>2", stop)], CompletionText(tokenizer), "policy")
    assert rewarded(tokenizer, [row | {"group": 0}], config, turn_end=ends) == [[1.0]]


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([("<think>a</think>", "")], "<think>a</think>"),  # truncated: its last token ends no turn
        ([("<think>a</think>", "<eos>")], "<think>a</think>"),
        ([("", "<eos>")], ""),
        ([("<think>a</think>b", "<end>"), ("c</think>", "<eos>")], "<think>a</think>bc</think>"),
        ([("a", "<end>"), ("<think>c", "")], "a<think>c"),
        ([("<think>a", "<over>"), ("c", "<over>")], "<think>ac"),
    ],
)
def test_no_end_of_a_turn_and_no_observation_is_in_the_text(
    turns: list[tuple[str, str]], text: str, tokenizer: Any
) -> None:
    rollout = Rollout.of(episode(tokenizer, *turns), CompletionText(tokenizer), "policy")
    (row,) = with_special_tokens([rollout.row()], CompletionText(tokenizer, skip_special_tokens=False))
    assert row["completion_text"] == text


@pytest.mark.parametrize(("skips", "seen"), [(True, "<think>2+2</think>4"), (False, "<think>2<end>+2</think>4")])
def test_environments_get_special_tokens_only_if_configured(file: Path, tokenizer: Any, skips: bool, seen: str) -> None:
    """Marks of thoughts stay in any case: calls inside thoughts do not count."""
    config = EnvironmentConfig(name=f"{file}:Echo", skip_special_tokens=skips)
    environments = Environments(config, tokenizer, processes=1, timeout=60)
    try:
        turns_of = Episode(0, 0, 0, prompt(), most_tokens=1000)
        environments.answer_all([turns_of])
        turns_of.append_turn(completion(tokenizer, "<think>2<end>+2</think>4"))
        environments.answer_all([turns_of])
    finally:
        environments.close()
    observation = tokenizer.decode(turns_of.ids[~turns_of.mask].tolist())
    assert observation.endswith(f"<user>{seen}")


@pytest.mark.parametrize(("skips", "score_of"), [(True, 0.0), (False, 1.0)])
def test_the_verifier_of_an_evaluation_gets_special_tokens_only_if_configured(
    file: Path, tokenizer: Any, skips: bool, score_of: float, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("rollouts", "tokenizer", "scores")}
    for folder in folders.values():
        folder.mkdir()
    tokenizer.save_pretrained(folders["tokenizer"])
    rows = shard_rows([prompt()], 0, [completion(tokenizer, THOUGHT)], CompletionText(tokenizer), "policy")
    write_table(rows, rollout_schema(), folders["rollouts"] / "shard-00000.parquet")
    machines: Any = SimpleNamespace(actors=SimpleNamespace(elsewhere=None))
    context = StageContext(
        inputs={name: folders[name] for name in ("rollouts", "tokenizer")},
        references=dict.fromkeys(("rollouts", "tokenizer"), Reference(kind="model", digest="a" * 64)),
        outputs={"scores": folders["scores"]},
        progress=tmp_path,
        seed=0,
        resources=ResourcesConfig(reward_timeout_seconds=60),
        machines=machines,
        reporter=lambda *_: None,
    )
    score.run(context, score.ScoreConfig(verifier=f"{file}:thinks", skip_special_tokens=skips))
    assert [row["verifier"] for row in read_scores(folders["scores"])] == [score_of]


def test_the_stage_that_verifies_is_given_the_tokenizer_and_another_key(composed: Any) -> None:
    compose(composed, "sft", evaluation={**EVALUATION, "skip_special_tokens": False})
    assert composed.roles("sft/evaluation/score")["tokenizer"] == "sft"
    scoring = composed.configs["sft/evaluation/score"]
    assert scoring.content()["skip_special_tokens"] is False
    assert "skip_special_tokens" not in scoring.model_copy(update={"skip_special_tokens": True}).content()


def test_skip_special_tokens_changes_no_default_key_and_is_refused_without_effect() -> None:
    assert "skip_special_tokens" not in CHOICE.validate({"verifier": "task"}).model_dump(mode="json")
    assert "skip_special_tokens" not in EnvironmentConfig(name="a:B").model_dump(mode="json")
    with pytest.raises(ValueError, match=r"`skip_special_tokens` has no effect here: set `rl\.environment\.skip"):
        CHOICE.validate({"environment": True, "skip_special_tokens": False}, REFUSE_UNUSED)
