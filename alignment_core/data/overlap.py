"""Prompts by digest: by them rows are held out, and held-out prompts are compared with those that were trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.data.messages import Messages, as_messages

FILE = "prompts.sha256"
"""In the folder of a data set: the digests of all prompts of its training table, one a line, sorted."""
_DIGITS = 16
"""Hex digits that the file keeps of a digest: two sets of a million prompts collide by chance once in 10⁷ times."""


def digest_of_prompt(prompt: str | Messages) -> str:
    """The digest of a prompt in any notation: a string is the same as one user message, and white space around a message does
    not count, nor do fields that say nothing to a model, such as a weight, a date or the id of a call. Raises TypeError for a
    message that JSON cannot hold.
    """
    return digest_of([_compared(message) for message in as_messages(prompt, "user")])


def _compared(message: dict[str, Any]) -> dict[str, Any]:
    compared = {"role": message["role"], "content": message["content"].strip()}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return compared
    return {
        **compared,
        "tool_calls": [call.get("function", call) if isinstance(call, dict) else call for call in calls],
    }


def digests_before_answers(messages: Messages) -> tuple[str, ...]:
    """Of what precedes each of the assistant's messages."""
    turns = (turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    return tuple(digest_of_prompt(messages[:turn]) for turn in turns)


def digest_of_text(text: str) -> str:
    """Of a text without a prompt, which stands for itself."""
    return digest_of(["text", text])


def write_prompts(prompts: Iterable[str], directory: Path) -> None:
    """Leave the prompts of a training table in its folder."""
    (directory / FILE).write_text("".join(f"{one}\n" for one in sorted({prompt[:_DIGITS] for prompt in prompts})))


def read_prompts(directory: Path) -> set[str]:
    """What :func:`write_prompts` left."""
    return set((directory / FILE).read_text().split())
