"""Answers in steps: prompt and steps are one text, and each step is judged at the token with which it ends."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.kinds.stepwise import Stepwise
from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.conversations import THREE_TURNS
from tests.rendering.families import Family
from tests.rendering.installed import FAMILIES
from tests.rendering.rows import readable, rows_of

STEPS = ["First we add 3 and 4, which is 7.", "Then we multiply 7 by 2.", "It is 14"]


def token_of(offsets: list[tuple[int, int]], place: int) -> int:
    """The last token that covers this character."""
    return max(token for token, (begin, end) in enumerate(offsets) if begin <= place < end)


def test_a_placeholder_behind_each_step_is_part_of_the_text(family: Family, renderer: Renderer) -> None:
    """Where it is a special token; each step is judged at it."""
    (mark,) = family.ids(family.eos)
    settings: dict[str, Any] = {"separator": "." if family.name == "words" else "\n", "placeholder": family.eos}
    steps = [step.rstrip(".") for step in STEPS]
    (row,) = rows_of(Stepwise(THREE_TURNS[:1], steps, [1.0, 1.0, 0.0]), renderer, family, **settings)
    prompt = expected.text(family, THREE_TURNS[:1], add_generation_prompt=True)
    text = prompt + "".join(step + settings["separator"] + family.eos for step in steps)
    right = list(family.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right)
    assert [place for place, token in enumerate(row["completion_ids"]) if token == mark] == row["step_ends"]


CASES = [
    (family, separator)
    for family in FAMILIES
    for separator in ("\n", "\n\n", ".")
    if family.keeps_spaces or separator == "."
]


@pytest.mark.parametrize(("family", "separator"), CASES, ids=str)
def test_steps_are_encoded_as_one_text_with_their_prompt(family: Family, renderer: Renderer, separator: str) -> None:
    steps = [step.rstrip(".") if separator == "." else step for step in STEPS]
    (row,) = rows_of(Stepwise(THREE_TURNS[:1], steps, [1.0, 1.0, 0.0]), renderer, family, separator=separator)
    tokenizer = family.tokenizer
    prompt = expected.text(family, THREE_TURNS[:1], add_generation_prompt=True)
    text = prompt + "".join(step + separator for step in steps)
    right = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right)
    assert row["prompt_ids"] + row["completion_ids"] == right
    prompt_ids = expected.prompt(family, THREE_TURNS[:1])
    assert row["prompt_ids"] == prompt_ids[: expected.common(prompt_ids, right)]
    if family.fast:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        ends = [
            len(prompt) + sum(len(step + separator) for step in steps[: number + 1]) - 1 for number in range(len(steps))
        ]
        assert [len(row["prompt_ids"]) + place for place in row["step_ends"]] == [
            token_of(offsets, end) for end in ends
        ]
    assert row["step_ends"][-1] == len(row["completion_ids"]) - 1
