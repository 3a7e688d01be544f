"""The tokens of chats with a real vocabulary of 48,900 merges, a default system prompt, and padding = EOS, by plain
``transformers``. Every family of models has such tests in `tests/rendering`, with small vocabularies."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from tests.exports.conftest import edit
from tests.real_model import ROOT
from tests.rendering import conversations, expected
from tests.rendering.families import Family
from tests.rendering.rows import readable, rows_of
from tests.rendering.test_conversations import check

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END, TEXT_END = 2, 0
"""<|im_end|>, which is EOS and padding, and <|endoftext|>."""


@pytest.fixture(scope="session")
def family(real_model: Path) -> Family:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, END)
    return Family(
        "SmolLM2", lambda: tokenizer, tokenizer.chat_template, eos="<|im_end|>", bos="<|im_start|>", end="<|im_end|>"
    )


@pytest.fixture(scope="session")
def renderer(family: Family) -> Renderer:
    return Renderer(family.tokenizer, eos_token_ids=family.stop_ids)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Text, code and tables, cut anywhere: before and behind spaces and line breaks, within words and characters' names."""
    source = "".join(
        (ROOT / name).read_text() for name in ("docs/design.md", "Makefile", "tests/rendering/templates.py")
    )
    source += "日本 \U0001f44d, grüße\u2028…\r\n\t'll  12345 \n\n\n" * 300
    choose = random.Random(3)
    starts = [choose.randrange(len(source)) for _ in range(1600)]
    cut = [source[start : start + choose.choice((1, 2, 5, 40, 200))] for start in starts]
    return [text for text in cut if text.strip()][:1200]


@pytest.mark.parametrize("name", conversations.BY_NAME)
def test_ids_and_targets_are_those_of_apply_chat_template(family: Family, renderer: Renderer, name: str) -> None:
    check(family, renderer, conversations.BY_NAME[name])


def test_turns_that_begin_and_end_anywhere_have_the_ids_of_apply_chat_template(
    family: Family, renderer: Renderer, texts: list[str]
) -> None:
    for number in range(0, len(texts), 4):
        first, reply, second, last = texts[number : number + 4]
        messages = [*user(first), *assistant(reply), *user(second), *assistant(last)]
        check(family, renderer, messages if number % 8 else [*conversations.SYSTEM, *messages])


def test_both_answers_of_a_pair_have_the_ids_of_their_conversations(
    family: Family, renderer: Renderer, texts: list[str]
) -> None:
    triples = list(zip(*[iter(texts)] * 3, strict=True))
    pairs = [
        (question, *answers) for question, *answers in triples if len(set(answers)) == 2
    ]  # some texts are cut alike
    assert len(pairs) > 0.99 * len(triples)
    for question, chosen, rejected in pairs:
        (row,) = rows_of(Preference(user(question), assistant(chosen), assistant(rejected)), renderer, family)
        for side, answer in (("chosen_ids", chosen), ("rejected_ids", rejected)):
            right = expected.last_turn(family, [*user(question), *assistant(answer)])
            assert readable(family, row["prompt_ids"] + row[side]) == readable(family, right.ids)


def test_the_default_system_prompt_comes_first_and_once(family: Family, renderer: Renderer, texts: list[str]) -> None:
    """Also in an episode, whose later messages are rendered apart."""
    for question, answer, reply in zip(texts[::3], map(str.strip, texts[1::3]), texts[2::3], strict=True):
        ids, text = renderer.prompt(user(question))
        assert ids == expected.prompt(family, user(question))
        assert text.startswith(f"<|im_start|>system\n{DEFAULT}<|im_end|>\n")
        sampled = family.tokenizer(answer)["input_ids"]
        behind = renderer.encode_reply(user(reply), END)
        conversation = [*user(question), *assistant(answer), *user(reply)]
        assert readable(family, [*ids, *sampled, END, *behind]) == readable(
            family, expected.prompt(family, conversation)
        )
    assert renderer.prompt([*conversations.SYSTEM, *user("?")])[1].count("<|im_start|>system") == 1


@pytest.mark.parametrize(
    ("eos", "stops"), [(END, {END}), ([END, TEXT_END], {END, TEXT_END}), (TEXT_END, {END, TEXT_END})]
)
def test_a_policy_stops_at_the_end_of_its_turn_and_where_generation_config_says(
    real_model: Path, tmp_path: Path, eos: Any, stops: set[int]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(real_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    edit(folder / "generation_config.json", eos_token_id=eos)
    renderer = Renderer(AutoTokenizer.from_pretrained(folder), eos_token_ids=eos_token_ids(folder))
    assert set(renderer.turn_end.stop_ids) == stops
    assert renderer.turn_end.token_id == END
