"""Prompts by digest: by them rows are held out, and held-out prompts are compared with those that were trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from alignment_core.canonical import digest_of
from alignment_core.data.messages import Messages, as_messages

FILE = "prompts.sha256"
"""In the folder of a data set: the digests of all prompts of its training table, one a line, sorted."""
_DIGITS = 16
"""Hex digits that the file keeps of a digest: two sets of a million prompts collide by chance once in 10⁷ times."""


def digest_of_prompt(prompt: str | Messages) -> str:
    """Of a prompt, however it is written: a string is the same as one user message, and white space around a message does
    not count. Raises TypeError for a message that JSON cannot hold.
    """
    messages = as_messages(prompt, "user")
    return digest_of([{**message, "content": message["content"].strip()} for message in messages])


def digest_of_text(text: str) -> str:
    """Of a text without a prompt, which stands for itself."""
    return digest_of(["text", text])


def write_prompts(prompts: Iterable[str], directory: Path) -> None:
    """Leave the prompts of a training table in its folder."""
    (directory / FILE).write_text("".join(f"{one}\n" for one in sorted({prompt[:_DIGITS] for prompt in prompts})))


def read_prompts(directory: Path) -> set[str]:
    """What :func:`write_prompts` left."""
    return set((directory / FILE).read_text().split())
