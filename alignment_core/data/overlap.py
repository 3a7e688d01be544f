"""Prompts by digest: by them rows are held out, and held-out prompts are compared with those that were trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.data.formats import Example, Messages, SftExample

FILE = "prompts.sha256"
"""In the folder of a data set: the digests of all prompts of its training table, one a line, sorted."""
_DIGITS = 16
"""Hex digits that the file keeps of a digest: two sets of a million prompts collide by chance once in 10⁷ times."""


def prompts_of(example: Example) -> tuple[str, ...]:
    """Digests of the prompts that a row has answers to; the last one is what precedes its last answer.

    A conversation has one for each assistant turn that is trained. Text without a prompt stands for itself. A prompt that
    is a string is the same as one user message, and white space around a message does not count. Raises TypeError for a
    message that JSON cannot hold.
    """
    if isinstance(example, SftExample) and example.prompt is None:
        return (digest_of(["text", example.completion]),)
    prompt = _messages(example.prompt or [])
    if not isinstance(example, SftExample) or isinstance(example.completion, str):
        return (digest_of(prompt),)
    messages = prompt + _messages(example.completion)
    turns = (turn for turn in range(len(prompt), len(messages)) if messages[turn]["role"] == "assistant")
    return tuple(digest_of(messages[:turn]) for turn in turns)


def _messages(text: str | Messages) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return [{**message, "content": message["content"].strip()} for message in messages]


def write_prompts(prompts: Iterable[str], directory: Path) -> None:
    """Leave the prompts of a training table in its folder."""
    (directory / FILE).write_text("".join(f"{one}\n" for one in sorted({prompt[:_DIGITS] for prompt in prompts})))


def read_prompts(directory: Path) -> set[str]:
    """What :func:`write_prompts` left."""
    return set((directory / FILE).read_text().split())
