"""Conversations: lists of messages, each with a ``role`` and its ``content``."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def as_given(row: Mapping[str, Any]) -> str | Messages | None:
    """What the prompt of a row, of prompts or of completions, was before the chat template; None where no template was applied,
    where the prompt was cut, and in rows of earlier versions."""
    given = row.get("messages")
    return json.loads(given) if given else None
