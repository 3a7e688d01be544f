"""Demonstrations: the ids of a whole conversation are those of ``apply_chat_template``, and the assistant's are its targets."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.template import Renderer
from tests.rendering import conversations, expected
from tests.rendering.conversations import THREE_TURNS
from tests.rendering.families import OWN, Family
from tests.rendering.installed import FAMILIES
from tests.rendering.rows import readable, rows_of


def check(family: Family, renderer: Renderer, messages: Any) -> None:
    """One row with all turns, or one for each turn, where the template renders history otherwise."""
    rendered = rows_of(Demonstration([], messages), renderer, family)
    right = expected.rows(family, messages)
    if len(rendered) == 1 and len(right) > 1:
        right = [expected.conversation(family, messages)]
    assert [readable(family, row["input_ids"]) for row in rendered] == [readable(family, row.ids) for row in right]
    assert [row["input_ids"] for row in rendered] == [row.ids for row in right]
    assert [row["loss_mask"] for row in rendered] == [row.mask for row in right]


CASES = [(family, name) for family in FAMILIES for name in conversations.BY_NAME if conversations.fits(family, name)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=str)
def test_ids_and_targets_are_those_of_apply_chat_template(family: Family, renderer: Renderer, name: str) -> None:
    check(family, renderer, conversations.BY_NAME[name])


def test_special_tokens_that_a_turn_spells_out_end_no_target_early(family: Family, renderer: Renderer) -> None:
    """``transformers`` encodes them as the tokens that they name. All of an earlier turn is a target all the same, up to the
    end that the template puts there."""
    tokens = [token for token in dict.fromkeys((family.eos, family.end)) if token]
    check(family, renderer, conversations.spelled_out(tokens))


def test_a_question_that_spells_out_the_end_of_a_turn_is_no_target(family: Family, renderer: Renderer) -> None:
    text = f"What is {family.end or family.eos}? And {family.eos}?"
    check(family, renderer, [{"role": "user", "content": text}, *THREE_TURNS[1:4]])


def test_a_row_ends_with_its_last_assistant_turn(family: Family, renderer: Renderer) -> None:
    """A user's message after it is no part of the row."""
    rendered = rows_of(Demonstration([], THREE_TURNS[:5]), renderer, family)
    assert rendered == rows_of(Demonstration([], THREE_TURNS[:4]), renderer, family)


def test_earlier_turns_are_context_where_the_last_alone_is_trained(family: Family, renderer: Renderer) -> None:
    (row,) = rows_of(Demonstration(THREE_TURNS[:5], THREE_TURNS[5:]), renderer, family)
    right = expected.last_turn(family, THREE_TURNS)
    assert readable(family, row["input_ids"]) == readable(family, right.ids)
    assert row["loss_mask"] == right.mask


def test_a_turn_of_weight_zero_is_context(family: Family, renderer: Renderer) -> None:
    """The ids are those of the whole conversation; the turn's tokens are no targets."""
    rows = rows_of(Demonstration([], THREE_TURNS, untrained=[3]), renderer, family)
    assert readable(family, rows[-1]["input_ids"]) == readable(family, expected.last_turn(family, THREE_TURNS).ids)
    targets = [[token for token, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on] for row in rows]
    if len(rows) == 1:
        first, _, last = expected.conversation(family, THREE_TURNS).turns
        assert targets == [first + last]
    else:
        first, _, last = (row.turns[0] for row in expected.rows(family, THREE_TURNS))
        assert targets == [first, last]


EOS_BEHIND_ALL = [family for family in FAMILIES if family.name in ("phi3", "phi4-mini", "trl-phi3", "trl-phi3_5")]


@pytest.mark.parametrize("family", EOS_BEHIND_ALL, ids=str, scope="session")
def test_eos_behind_the_last_turn_alone_does_not_split_a_conversation(family: Family, renderer: Renderer) -> None:
    """It is no part of the history that inference sees."""
    (row,) = rows_of(Demonstration([], THREE_TURNS), renderer, family)
    right = expected.conversation(family, THREE_TURNS)
    assert readable(family, row["input_ids"]) == readable(family, right.ids)
    assert row["loss_mask"] == right.mask
    assert len(expected.runs(row["loss_mask"])) == 3


MARKED = [family for family in OWN if family.keeps_history and family.end and family.fast]


@pytest.mark.parametrize("family", MARKED, ids=str, scope="session")
def test_targets_are_the_assistant_mask_of_transformers(family: Family, renderer: Renderer) -> None:
    """By the marks ``generation`` in a template, which neither the renderer nor the other tests read."""
    rendered = rows_of(Demonstration([], THREE_TURNS), renderer, family)
    right = expected.marked(family, THREE_TURNS)
    if len(rendered) > 1:  # each turn alone
        begin, end = expected.runs(right.mask)[-1]
        right = expected.Row(right.ids, [0] * begin + [1] * (end - begin))
    assert readable(family, rendered[-1]["input_ids"]) == readable(family, right.ids)
    assert rendered[-1]["loss_mask"] == right.mask
