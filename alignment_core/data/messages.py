"""Conversations: lists of messages, each with a ``role`` and its ``content``."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]


def user(text: str) -> Messages:
    """What a user says, as a conversation."""
    return [{"role": "user", "content": text}]


def assistant(text: str) -> Messages:
    """What an assistant says, as the end of a conversation."""
    return [{"role": "assistant", "content": text}]


def as_messages(value: str | Messages, role: str) -> Messages:
    """A text as one message of ``role``; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
