"""Episodes of several turns: a context built turn by turn is the conversation that ``apply_chat_template`` encodes."""

from __future__ import annotations

import pytest

from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.conversations import THREE_TURNS, WHITE_SPACE, Messages
from tests.rendering.families import Family
from tests.rendering.rows import readable

REWRITES_TURNS = ("gpt-oss", "trl-gptoss", "trl-qwen3", "trl-qwen3_6")
"""They render any turn otherwise once the next follows, while the tokens that a policy has sampled stay as they are."""


def written(family: Family, messages: Messages) -> list[int]:
    """The tokens of the last turn as a policy would sample them."""
    row = expected.last_turn(family, messages)
    if row.mask.index(1) < len(expected.prompt(family, messages[:-1])):
        pytest.skip("the answer's first token begins in the prompt, whose own ids a policy cannot take back")
    return row.turns[0]


def without_end(family: Family, messages: Messages) -> list[int]:
    """The tokens of the last turn up to the end of its content."""
    text, content = family.tokenizer.apply_chat_template(messages, tokenize=False), messages[-1]["content"]
    ids = family.tokenizer(text[: text.rindex(content) + len(content)], add_special_tokens=False)["input_ids"]
    begin, end = len(expected.prompt(family, messages[:-1])), expected.common(ids, expected.encoded(family, messages))
    return list(ids[begin:end])


@pytest.fixture(autouse=True)
def _renders_all_turns_alike(family: Family) -> None:
    if family.name in REWRITES_TURNS:
        pytest.skip("a test of its own: it renders turns otherwise once others follow")


@pytest.mark.parametrize(
    "messages", [THREE_TURNS, [*THREE_TURNS[:2], *WHITE_SPACE, *THREE_TURNS[:2]]], ids=["plain", "spaces"]
)
def test_context_is_the_conversation(family: Family, renderer: Renderer, messages: Messages) -> None:
    if messages is not THREE_TURNS and (not family.keeps_spaces or family.end is None):
        pytest.skip("an answer's white space has no tokens, or joins what follows it")
    context = renderer.asked(messages[:1], None)
    for turn in range(1, len(messages) - 1, 2):
        policy = written(family, messages[: turn + 1])
        ended_by = policy[-1]
        right = expected.prompt(family, messages[: turn + 2])
        if family.end is None and context + policy != right[: len(context + policy)]:
            assert policy.pop() == family.tokenizer.eos_token_id, "which the template does not show"
        context += policy + renderer.told(messages[turn + 1 : turn + 2], ended_by)
        assert readable(family, context) == readable(family, right)
        assert context == right


def test_a_truncated_turn_is_closed_as_the_template_closes_turns(family: Family, renderer: Renderer) -> None:
    """Once, so that the context is the one behind a turn that the policy itself had ended."""
    written(family, THREE_TURNS[:2])
    context = renderer.asked(THREE_TURNS[:1], None)
    context += without_end(family, THREE_TURNS[:2]) + renderer.told(THREE_TURNS[2:3], ended_by=None)
    right = expected.prompt(family, THREE_TURNS[:3])
    assert readable(family, context) == readable(family, right)
    assert context == right


def test_a_turn_that_the_next_speakers_tag_ends_has_that_tag_once(family: Family, renderer: Renderer) -> None:
    """Such a tag is among the ids of generation_config.json, so the policy has sampled it as the last token of its turn."""
    tag = next((token for token in family.stops if token == "<|user|>"), None)
    if tag is None:
        pytest.skip("no tag ends a turn of this family")
    (ended_by,) = family.ids(tag)
    policy = [*written(family, THREE_TURNS[:2])[:-1], ended_by]
    context = renderer.asked(THREE_TURNS[:1], None) + policy + renderer.told(THREE_TURNS[2:3], ended_by)
    right = expected.prompt(family, THREE_TURNS[:3])
    assert readable(family, context) == readable(family, right)


def test_what_is_said_before_the_first_turn_is_part_of_the_prompt(family: Family, renderer: Renderer) -> None:
    opening = [*THREE_TURNS[:1], {"role": "user", "content": "Be quick."}]
    try:
        right = expected.prompt(family, opening)
    except Exception:
        pytest.skip("the template refuses two messages of a user")
    text = family.tokenizer.apply_chat_template(opening[:1], tokenize=False, add_generation_prompt=True)
    context = renderer.told_first(text, opening[1:])
    assert readable(family, context) == readable(family, right)
