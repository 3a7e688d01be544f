"""Digests of prompts, which decide the rows that are held out and find held-out prompts that were trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.data.images import is_image
from alignment_core.data.messages import Messages, as_messages

FILE = "prompts.sha256"
"""In the folder of a data set: the digests of all prompts of its training table, one a line, sorted."""
_DIGITS = 16
"""Hex digits that the file keeps of a digest: two sets of a million prompts collide by chance once in 10⁷ times."""


def digest_of_prompt(prompt: str | Messages) -> str:
    """The digest of a prompt in any notation: a string equals one user message. White space around a message does not count,
    nor do fields that no model reads, such as a weight, a date or the id of a call. Raises TypeError for a message that JSON
    cannot represent.
    """
    return digest_of([_compared(message) for message in as_messages(prompt, "user")])


def _compared(message: dict[str, Any]) -> dict[str, Any]:
    compared = {"role": message["role"], "content": _stripped(message["content"])}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return compared
    return {
        **compared,
        "tool_calls": [call.get("function", call) if isinstance(call, dict) else call for call in calls],
    }


def _stripped(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content without white space around each of its texts; texts of white space alone are left out beside images."""
    if isinstance(content, str):
        return content.strip()
    stripped = [part if is_image(part) else {**part, "text": part["text"].strip()} for part in content]
    return [part for part in stripped if is_image(part) or part["text"]]


def digests_before_answers(messages: Messages) -> tuple[str, ...]:
    """Digests of the messages before each of the assistant's messages."""
    turns = (turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    return tuple(digest_of_prompt(messages[:turn]) for turn in turns)


def digest_of_text(text: str) -> str:
    """The digest of a text without a prompt, which counts as its own prompt."""
    return digest_of(["text", text])


def write_prompts(prompts: Iterable[str], directory: Path) -> None:
    """Write the digests of the prompts of a training table to its folder."""
    digests = sorted({prompt[:_DIGITS] for prompt in prompts})
    (directory / FILE).write_text("".join(f"{digest}\n" for digest in digests))


def read_prompts(directory: Path) -> set[str]:
    """The digests that :func:`write_prompts` wrote."""
    return set((directory / FILE).read_text().split())
