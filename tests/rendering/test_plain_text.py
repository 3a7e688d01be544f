"""Without a chat template: prompt and completion are one text, as ``__call__`` encodes it."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.documents import Document
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.texts import Text
from alignment_core.data.kinds.unpaired import Labelled
from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.families import OWN, Family, build
from tests.rendering.rows import readable, rows_of

PAIRS = [
    ("12 + 34 =", " 46"),
    ("The capital of France is ", "Paris."),
    ("def add(a, b):\n", "    return a + b"),
    ("hel", "lo"),
    ("12 + 34 =  ", "日"),
]
pytestmark = pytest.mark.parametrize("family", OWN, ids=str, scope="session")


@pytest.fixture(scope="module")
def plain() -> dict[str, Renderer]:
    return {}


@pytest.fixture
def without_template(family: Family, plain: dict[str, Renderer]) -> Renderer:
    if family.name not in plain:
        tokenizer = build(family)
        tokenizer.chat_template = None
        plain[family.name] = Renderer(tokenizer, eos_token_ids=family.stop_ids)
    return plain[family.name]


def called(family: Family, text: str) -> list[int]:
    """The tokenizer's ids of a text, without an EOS that it may add."""
    ids = list(family.tokenizer(text)["input_ids"])
    return ids[:-1] if ids[-1:] == [family.tokenizer.eos_token_id] else ids


def whole(family: Family, text: str) -> list[int]:
    return [*called(family, text), family.tokenizer.eos_token_id]


@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_prompt_and_completion_are_encoded_as_one_text(
    family: Family, without_template: Renderer, prompt: str, completion: str
) -> None:
    right, prompt_ids = whole(family, prompt + completion), called(family, prompt)
    parted = expected.common(prompt_ids, right)
    (row,) = rows_of(Demonstration(prompt, completion), without_template, family)
    assert readable(family, row["input_ids"]) == readable(family, right)
    assert row["input_ids"] == right
    assert row["loss_mask"] == [0] * parted + [1] * (len(right) - parted)
    (row,) = rows_of(Labelled(prompt, completion, True), without_template, family)
    assert (row["prompt_ids"], row["completion_ids"]) == (right[:parted], right[parted:])
    (row,) = rows_of(Preference(prompt, completion, "Rome"), without_template, family)
    assert row["prompt_ids"] + row["chosen_ids"] == right
    assert row["prompt_ids"] + row["rejected_ids"] == whole(family, prompt + "Rome")
    (row,) = rows_of(Prompt(prompt), without_template, family)
    assert row["prompt_ids"] == prompt_ids


@pytest.mark.parametrize("example", [Text, Document], ids=["text", "document"])
def test_a_text_is_tokenized_with_a_trailing_eos(family: Family, without_template: Renderer, example: Any) -> None:
    text = "The capital of France is Paris.\n\nIt's late."
    (row,) = rows_of(example(text), without_template, family)
    assert readable(family, row["input_ids"]) == readable(family, whole(family, text))
    assert row["input_ids"] == whole(family, text)


def test_the_blocks_of_a_document_have_each_of_its_tokens_once_as_a_target(
    family: Family, without_template: Renderer
) -> None:
    """Tokens are cut as those of the whole; a block begins with BOS or else with the last token of the one before."""
    text = "The capital of France is Paris.\n\nIt's late. Do you know others? Yes, I do."
    right = whole(family, text)
    bos = 1 if family.tokenizer("a")["input_ids"][0] == family.tokenizer.bos_token_id else 0
    rows = rows_of(Document(text), without_template, family, max_length=8)
    targets = [ids for row in rows for ids, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
    assert readable(family, targets) == readable(family, right[1:]), (
        "behind BOS, or a first token that nothing precedes"
    )
    assert [row["input_ids"][:bos] for row in rows] == [right[:bos]] * len(rows)
    assert max(len(row["input_ids"]) for row in rows) == 8


def test_an_observation_is_encoded_after_the_policys_text(family: Family, without_template: Renderer) -> None:
    """The policy ended its text with EOS; text after a special token is encoded as by ``__call__``."""
    begin = "First we add 3 and 4, which is 7."
    observed = "Then we multiply"
    policy = [*called(family, begin), family.tokenizer.eos_token_id]
    context = policy + without_template.encode_reply([{"role": "user", "content": observed}], ended_by=policy[-1])
    right = list(family.tokenizer(begin + family.eos + observed)["input_ids"])
    right = right[:-1] if right[-1] == family.tokenizer.eos_token_id else right
    assert readable(family, context) == readable(family, right)
