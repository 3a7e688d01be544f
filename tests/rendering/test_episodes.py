"""Episodes of several turns: a context built turn by turn is the conversation that ``apply_chat_template`` encodes."""

from __future__ import annotations

import pytest

from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.conversations import THREE_TURNS, WHITE_SPACE, Messages
from tests.rendering.families import Family
from tests.rendering.installed import FAMILIES
from tests.rendering.rows import readable

CHATS = {"plain": THREE_TURNS, "white space": [*THREE_TURNS[:2], *WHITE_SPACE, *THREE_TURNS[:2]]}
KEEPING = [family for family in FAMILIES if family.keeps_history or family.name == "qwen3-thinking"]
"""Others render any turn otherwise once the next follows; see test_rewritten_turns.py."""
# Without an end of turn an answer's white space may join the text that follows.
CASES = [
    (family, name)
    for family in KEEPING
    for name in CHATS
    if name == "plain" or (family.keeps_spaces and family.keeps_history and family.end)
]


@pytest.mark.parametrize(("family", "name"), CASES, ids=str)
def test_context_is_the_conversation(family: Family, renderer: Renderer, name: str) -> None:
    messages = CHATS[name]
    context = renderer.encode_conversation(messages[:1], None)
    for turn in range(1, len(messages) - 1, 2):
        row = expected.last_turn(family, messages[: turn + 1])
        (policy,) = row.turns
        context = context[: row.mask.index(1)]  # an answer may change the prompt's last token
        ended_by, right = policy[-1], expected.prompt(family, messages[: turn + 2])
        if family.end is None and context + policy != right[: len(context + policy)]:
            assert policy.pop() == family.tokenizer.eos_token_id, "which the template does not show"
        context += policy + renderer.encode_reply(messages[turn + 1 : turn + 2], ended_by)
        assert readable(family, context) == readable(family, right)
        assert context == right


@pytest.mark.parametrize("family", KEEPING, ids=str)
def test_a_truncated_turn_is_closed_as_the_template_closes_turns(family: Family, renderer: Renderer) -> None:
    """Once, so that the context is the one behind a turn that the policy itself had ended."""
    text, content = expected.text(family, THREE_TURNS[:2]), THREE_TURNS[1]["content"]
    ids = list(family.tokenizer(text[: text.rindex(content) + len(content)], add_special_tokens=False)["input_ids"])
    truncated = ids[: expected.common(ids, expected.encoded(family, THREE_TURNS[:2]))]
    context, right = (
        truncated + renderer.encode_reply(THREE_TURNS[2:3], ended_by=None),
        expected.prompt(family, THREE_TURNS[:3]),
    )
    assert readable(family, context) == readable(family, right)
    assert context == right


@pytest.mark.parametrize("family", [candidate for candidate in KEEPING if "<|user|>" in candidate.stops], ids=str)
def test_a_turn_that_the_next_speakers_tag_ends_has_that_tag_once(family: Family, renderer: Renderer) -> None:
    """Such a tag is among the ids of generation_config.json, so the policy has sampled it as the last token of its turn."""
    (ended_by,) = family.ids("<|user|>")
    context = [*expected.last_turn(family, THREE_TURNS[:2]).ids[:-1], ended_by]
    context += renderer.encode_reply(THREE_TURNS[2:3], ended_by)
    assert readable(family, context) == readable(family, expected.prompt(family, THREE_TURNS[:3]))


@pytest.mark.parametrize("family", [candidate for candidate in KEEPING if not candidate.alternates], ids=str)
def test_messages_before_the_first_turn_are_part_of_the_prompt(family: Family, renderer: Renderer) -> None:
    opening: Messages = [*THREE_TURNS[:1], {"role": "user", "content": "Be quick."}]
    text = expected.text(family, opening[:1], add_generation_prompt=True)
    context = renderer.encode_opening(text, opening[1:])
    assert readable(family, context) == readable(family, expected.prompt(family, opening))
