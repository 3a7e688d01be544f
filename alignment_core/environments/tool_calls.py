"""Tool calls in what a policy says: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

TAGS = ("<tool_call>", "</tool_call>")
"""Text that stays in a turn also where a tokenizer has it as special tokens."""
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call of a tool, or with ``problem`` what is wrong with it."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str = ""


def parse(text: str) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and these in their order."""
    return _CALL.sub("", text).strip(), [_call(found) for found in _CALL.findall(text)]


def _call(text: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(problem='not of the form {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem="`arguments` is not an object")
    return Call(value["name"], arguments)
