"""The reason that an HTTP server gives for refusing a request: short, on one line, without control characters."""

from __future__ import annotations

import json
from typing import Any

import httpx

from alignment_core.credentials import cut

SHOWN = 300
"""Characters of a reason that a message shows."""
FIELDS = ("message", "error", "detail", "reason", "msg")
"""Fields of a JSON object that may hold the reason, or an object with it."""


def reason(response: httpx.Response) -> str:
    """The reason in the body, without secrets of this process; empty if it has no words."""
    text = cut((_message_of(response) or response.text)[: 20 * SHOWN])
    plain = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if not any(letter.isalnum() for letter in plain):
        return ""
    return f"{plain[:SHOWN]}…" if len(plain) > SHOWN else plain


def status(response: httpx.Response) -> str:
    """``answered 400 Bad Request``."""
    return f"answered {response.status_code} {response.reason_phrase}".rstrip()


def because(response: httpx.Response) -> str:
    """``: reason``; empty if there is none."""
    why = reason(response)
    return f": {why}" if why else ""


def _message_of(response: httpx.Response) -> str:
    try:
        content: Any = json.loads(response.text)
    except (ValueError, RecursionError):
        return ""
    for _ in range(4):
        if isinstance(content, list) and content:
            content = content[0]
        if not isinstance(content, dict):
            break
        content = next((content[name] for name in FIELDS if content.get(name)), None)
    return content if isinstance(content, str) else ""
