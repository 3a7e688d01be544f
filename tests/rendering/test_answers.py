"""Preferences, labelled completions and prompts: prompt and answer are encoded together, and parted where TRL parts them."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.unpaired import Labelled
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from tests.rendering import conversations, expected
from tests.rendering.conversations import SYSTEM, THREE_TURNS
from tests.rendering.families import Family
from tests.rendering.installed import FAMILIES
from tests.rendering.rows import readable, rows_of

PROMPTS: dict[str, Any] = {
    "question": THREE_TURNS[:1],
    "third question": THREE_TURNS[:5],
    "system message": [*SYSTEM, *THREE_TURNS[:1]],
}
YES, NO = assistant("yes, of course"), assistant("46")


CASES = [(family, name) for family in FAMILIES for name in PROMPTS if conversations.fits(family, name)]
for_each_prompt = pytest.mark.parametrize(("family", "name"), CASES, ids=str)


def whole(family: Family, messages: Any, answer: Any) -> list[int]:
    return expected.last_turn(family, [*messages, *answer]).ids


@for_each_prompt
def test_a_pair_is_two_conversations_with_one_prompt(family: Family, renderer: Renderer, name: str) -> None:
    prompt = PROMPTS[name]
    (row,) = rows_of(Preference(prompt, YES, NO), renderer, family)
    chosen, rejected = (whole(family, prompt, answer) for answer in (YES, NO))
    prompt_ids = expected.prompt(family, prompt)
    parted = min(expected.common(prompt_ids, chosen), expected.common(prompt_ids, rejected))
    for answer, right in (("chosen", chosen), ("rejected", rejected)):
        assert readable(family, row["prompt_ids"] + row[f"{answer}_ids"]) == readable(family, right)
        assert row["prompt_ids"] + row[f"{answer}_ids"] == right
    assert row["prompt_ids"] == prompt_ids[:parted]


@for_each_prompt
def test_a_labelled_completion_is_a_conversation(family: Family, renderer: Renderer, name: str) -> None:
    prompt = PROMPTS[name]
    (row,) = rows_of(Labelled(prompt, YES, True), renderer, family)
    right = whole(family, prompt, YES)
    prompt_ids = expected.prompt(family, prompt)
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right)
    assert row["prompt_ids"] + row["completion_ids"] == right
    assert row["prompt_ids"] == prompt_ids[: expected.common(prompt_ids, right)]


@for_each_prompt
def test_a_prompt_equals_apply_chat_template(family: Family, renderer: Renderer, name: str) -> None:
    prompt = PROMPTS[name]
    (row,) = rows_of(Prompt(prompt), renderer, family)
    assert readable(family, row["prompt_ids"]) == readable(family, expected.prompt(family, prompt))
    assert row["prompt_ids"] == renderer.encode_conversation(prompt, None) == expected.prompt(family, prompt)


def test_texts_are_a_question_and_its_answer(family: Family, renderer: Renderer) -> None:
    (row,) = rows_of(Preference("And you?", "fine", "so so"), renderer, family)
    right = expected.last_turn(family, [*user("And you?"), *assistant("fine")]).ids
    assert readable(family, row["prompt_ids"] + row["chosen_ids"]) == readable(family, right)
    (row,) = rows_of(Prompt("And you?"), renderer, family)
    assert row["prompt_ids"] == expected.prompt(family, user("And you?"))


def test_prompt_and_text_of_an_answer_give_its_ids_again(family: Family, renderer: Renderer) -> None:
    """A reward model reads them: a text that it was trained on has to get the ids that it was trained on."""
    (row,) = rows_of(Labelled(user("And you?"), YES, True), renderer, family)
    ids = renderer.closed(row["prompt"] + row["completion"])
    assert readable(family, ids) == readable(family, row["prompt_ids"] + row["completion_ids"])


def test_an_answer_with_the_tail_of_its_turn_is_a_whole_conversation(family: Family, renderer: Renderer) -> None:
    """Reward models from elsewhere were trained on ``apply_chat_template``, which writes text behind the end of a turn."""
    right = expected.encoded(family, [*user("And you?"), *YES])
    answered = renderer.answered(user("And you?"), YES, with_tail=True)
    assert readable(family, answered.prompt_ids + answered.ids) == readable(family, right)
    (row,) = rows_of(Labelled(user("And you?"), YES, True), renderer, family)
    assert readable(family, renderer.closed(row["prompt"] + row["completion"], True)) == readable(family, right)
    text = expected.text(family, [*user("And you?"), *YES])
    assert readable(family, renderer.closed(text, True)) == readable(family, right)


def test_a_turn_that_another_token_ended_ends_as_in_training(family: Family, renderer: Renderer) -> None:
    """The policy of a base model stops at its EOS, where a reward model was trained with another end of turns."""
    (row,) = rows_of(Labelled(user("And you?"), YES, True), renderer, family)
    right = readable(family, row["prompt_ids"] + row["completion_ids"])
    text = row["prompt"] + row["completion"]
    special = {token.content for token in family.tokenizer.added_tokens_decoder.values() if token.special}
    own = {token for token in special if renderer.turn_end.text.endswith(token)}
    others = special - own - {family.tokenizer.bos_token}
    assert {token: readable(family, renderer.closed(text + token)) for token in others} == dict.fromkeys(others, right)


def test_the_text_of_an_answer_ends_with_its_content(family: Family, renderer: Renderer) -> None:
    """Verifiers compare it with labels, so the end of the turn is no part of it, such as `` </s>`` of Llama 2."""
    (row,) = rows_of(Labelled(user("And you?"), YES, True), renderer, family)
    text = expected.text(family, [*user("And you?"), *YES])
    prompt = expected.text(family, user("And you?"), add_generation_prompt=True)
    content = YES[0]["content"]
    assert row["completion"] == text.removeprefix(prompt)[: text.rindex(content) + len(content) - len(prompt)]
