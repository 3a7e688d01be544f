"""Mistral's own code encodes a conversation as this code does."""

from __future__ import annotations

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.template import Renderer
from tests.rendering import conversations
from tests.rendering.families import Family
from tests.rendering.installed import INSTALLED, MISTRAL
from tests.rendering.rows import readable, rows_of

pytestmark = pytest.mark.parametrize(
    "family", [family for family in INSTALLED if family.name == "mistral_common-v3"], ids=str, scope="session"
)
CHATS = {"three turns": conversations.THREE_TURNS, "unicode": conversations.UNICODE}


def by_mistral(messages: conversations.Messages) -> list[int]:
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    roles = {"user": UserMessage, "assistant": AssistantMessage}
    chat = [roles[message["role"]](content=message["content"]) for message in messages]
    tokenizer = MistralTokenizer.from_file(str(MISTRAL / "mistral_instruct_tokenizer_240323.model.v3"))
    return list(tokenizer.encode_chat_completion(ChatCompletionRequest(messages=chat)).tokens)


@pytest.mark.parametrize("name", CHATS)
def test_prompts_and_earlier_turns_have_the_ids_of_mistral_common(
    family: Family, renderer: Renderer, name: str
) -> None:
    messages = CHATS[name][:3]
    right = by_mistral(messages)
    assert readable(family, renderer.encode_conversation(messages, None)) == readable(family, right)
    (row,) = rows_of(Demonstration([], messages[:2]), renderer, family)
    assert readable(family, row["input_ids"]) == readable(family, right[: len(row["input_ids"])])
    context = row["input_ids"] + renderer.encode_reply(messages[2:], ended_by=row["input_ids"][-1])
    assert readable(family, context) == readable(family, right)
