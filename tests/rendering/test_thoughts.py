"""Thoughts in a separate field, if the template reads one."""

from __future__ import annotations

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.unpaired import Labelled
from alignment_core.data.messages import user
from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.families import Family
from tests.rendering.installed import INSTALLED
from tests.rendering.rows import readable, rows_of

FIELD = {
    "trl-qwen3": "reasoning_content",
    "trl-qwen3_training": "reasoning_content",
    "trl-qwen3_6": "reasoning_content",
    "trl-qwen3_8": "reasoning_content",
    "trl-lfm2_2_5": "thinking",
    "trl-lfm2_2_5_v2": "thinking",
    "trl-gptoss": "thinking",
}
"""As each template names it."""
pytestmark = [
    pytest.mark.parametrize("given", ["reasoning_content", "thinking"]),
    pytest.mark.parametrize(
        "family", [candidate for candidate in INSTALLED if candidate.name in FIELD], ids=str, scope="session"
    ),
]


def turn(field: str) -> expected.Messages:
    return [{"role": "assistant", "content": "46", field: "2 + 4 = 6"}]


def test_thoughts_are_targets_under_either_name(family: Family, renderer: Renderer, given: str) -> None:
    """The right ids are those of the field that the template reads."""
    right = expected.last_turn(family, [*user("12 + 34?"), *turn(FIELD[family.name])])
    assert "2 + 4 = 6" in family.tokenizer.decode(right.turns[0])
    (row,) = rows_of(Demonstration([], [*user("12 + 34?"), *turn(given)]), renderer, family)
    assert readable(family, row["input_ids"]) == readable(family, right.ids)
    assert row["loss_mask"] == right.mask
    (row,) = rows_of(Labelled(user("12 + 34?"), turn(given), True), renderer, family)
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right.ids)
