"""Messages in ShareGPT's form, with ``from`` and ``value``, as messages with ``role`` and ``content``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Names of the roles in data sets."""
CALL = "function_call"
"""The role of a message that is the JSON text of a call, or of a list of calls: ``{"name": …, "arguments": …}``."""


def is_sharegpt(message: Any) -> bool:
    """Whether a message has this form."""
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys() and message.get("role") is None


def to_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same with ``role`` and ``content``, and ``tool_calls`` for calls; further fields stay.

    ``name`` says where it is. Raises ValueError for an unknown role and for a call that is not JSON.
    """
    rest = {field: value for field, value in message.items() if field not in ("from", "value", "role", "content")}
    sender, value = message["from"], message["value"]
    role = ROLES.get(sender.strip().lower()) if isinstance(sender, str) else None
    if role is None:
        raise ValueError(f"`{name}.from` is {sender!r}; known are {', '.join(ROLES)}")
    if sender.strip().lower() != CALL:
        return {"role": role, "content": value, **rest}
    return {"role": role, "content": "", "tool_calls": _calls(value, f"{name}.value"), **rest}


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f'`{name}` is not the JSON text of a call such as {{"name": …, "arguments": …}}')
    return [{"type": "function", "function": call} for call in calls]
