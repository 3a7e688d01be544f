"""Templates that render a turn otherwise once the next follows: thoughts are left out, or another token ends it."""

from __future__ import annotations

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from tests.rendering import expected
from tests.rendering.conversations import THREE_TURNS
from tests.rendering.families import OWN, Family
from tests.rendering.installed import INSTALLED
from tests.rendering.rows import readable, rows_of

REWRITING = [family for family in [*OWN, *INSTALLED] if not family.keeps_history]
pytestmark = pytest.mark.parametrize("family", REWRITING, ids=str, scope="session")

THOUGHTS = [
    *user("12 + 34?"),
    *assistant("<think>\n2 + 4 = 6\n</think>\n\n46"),
    *user("And 1 more?"),
    *assistant("<think>\n46 + 1\n</think>\n\n47"),
]


def test_each_turn_is_a_row_as_inference_saw_it(family: Family, renderer: Renderer) -> None:
    rows = rows_of(Demonstration([], THOUGHTS), renderer, family)
    right = expected.rows(family, THOUGHTS)
    assert [readable(family, row["input_ids"]) for row in rows] == [readable(family, row.ids) for row in right]
    assert [row["loss_mask"] for row in rows] == [row.mask for row in right]


def test_an_episode_of_several_turns_is_refused_where_every_turn_is_rewritten(
    family: Family, renderer: Renderer
) -> None:
    if family.name == "qwen3-thinking":
        pytest.skip("it leaves turns without thoughts as they are")
    with pytest.raises(UserError, match="once a reply follows"):
        renderer.told(THREE_TURNS[2:3])
