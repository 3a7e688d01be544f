"""Conversations: lists of messages, each with a ``role`` and its ``content``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from alignment_core.data.images import PREFIX, image_label, is_image

Messages = list[dict[str, Any]]


def user(text: str) -> Messages:
    """A text of the user as a conversation."""
    return [{"role": "user", "content": text}]


def assistant(text: str) -> Messages:
    """A text of the assistant as the end of a conversation."""
    return [{"role": "assistant", "content": text}]


def as_messages(value: str | Messages, role: str) -> Messages:
    """A text as one message of ``role``; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def answered_calls(messages: Messages) -> list[dict[str, Any]]:
    """Calls that the messages of tools at the beginning of ``messages`` may answer, without arguments."""
    return [
        {
            "id": message.get("tool_call_id", ""),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for message in takewhile(lambda message: message["role"] == "tool", messages)
    ]


def as_given(row: Mapping[str, Any]) -> str | Messages | None:
    """The prompt of a row (of prompts or of completions) before the chat template; None if no template was applied or the
    prompt was truncated."""
    given = row.get("messages")
    return json.loads(given) if given else None


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the prompt of a row offers, as schemas of functions, where :func:`as_given` has the prompt; else None."""
    tools = row.get("tools")
    return json.loads(tools) if tools else None


def text_of(content: str | Sequence[Mapping[str, Any]], show: Callable[[str], str] = image_label) -> str:
    """The content of a message for a reader: an image is what ``show`` makes of its digest."""
    if isinstance(content, str):
        return content
    return "".join(
        show(str(part["image"]).removeprefix(PREFIX)) if is_image(part) else part["text"] for part in content
    )


def in_words(
    prompt: str | Messages, tools: list[dict[str, Any]] | None, show: Callable[[str], str] = image_label
) -> str:
    """A prompt for a reader: a text or a single message as it is, otherwise one paragraph for each message, with its speaker
    and calls, and the tools before them. An image is what ``show`` makes of its digest."""
    if isinstance(prompt, str):
        prompt = user(prompt)
    if len(prompt) == 1 and not tools:
        return text_of(prompt[0]["content"], show)
    paragraphs = [f"tools: {json.dumps(tools, ensure_ascii=False)}"] if tools else []
    for message in prompt:
        calls = message.get("tool_calls")
        parts = [text_of(message["content"], show), *([json.dumps(calls, ensure_ascii=False)] if calls else [])]
        paragraphs.append(f"{message['role']}: {' '.join(filter(None, parts))}")
    return "\n\n".join(paragraphs)
