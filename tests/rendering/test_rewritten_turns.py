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


def test_each_turn_is_a_row_as_in_inference(family: Family, renderer: Renderer) -> None:
    rows = rows_of(Demonstration([], THOUGHTS), renderer, family)
    right = expected.rows(family, THOUGHTS)
    assert [readable(family, row["input_ids"]) for row in rows] == [readable(family, row.ids) for row in right]
    assert [row["loss_mask"] for row in rows] == [row.mask for row in right]


@pytest.mark.parametrize("messages", [THREE_TURNS, THOUGHTS], ids=["plain", "thoughts"])
@pytest.mark.parametrize("closed", [True, False], ids=["ended", "truncated"])
def test_a_sampled_turn_is_followed_by_the_templates_tokens(
    family: Family, renderer: Renderer, messages: expected.Messages, closed: bool
) -> None:
    """The policy's own tokens stay in its context as they were sampled; followed by the template's text.

    If the template drops the beginning of earlier turns, such as an empty thought, such an episode is refused with the name
    of a template that keeps it, which test_episodes.py tests.
    """
    if family.name in ("trl-qwen3", "trl-qwen3_6"):
        with pytest.raises(UserError, match=r"once a reply follows.* set model\.chat_template to .*qwen3_training"):
            renderer.encode_reply(messages[2:3], None)
        return
    answer, reply = messages[1]["content"].split("\n")[-1], messages[2:3]
    text = expected.text(family, messages[:3], add_generation_prompt=True)
    behind = text[text.index(answer, text.index(messages[0]["content"]) + 1) + len(answer) :]
    right = list(family.tokenizer(behind, add_special_tokens=False)["input_ids"])
    assert right[0] in family.ids(family.end, *family.ends_of_history), "the end of the turn comes first"
    ended_by = family.ids(family.end)[0] if closed else None
    assert readable(family, renderer.encode_reply(reply, ended_by)) == readable(family, right[1:] if closed else right)
