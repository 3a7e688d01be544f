"""A real HTTP server that speaks as OpenAI's chat completions do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def completion(
    text: str | None, logps: Mapping[str, float] | None = None, finish_reason: str = "stop"
) -> tuple[int, bytes]:
    """An answer with this text, and with the likeliest first tokens if they are given."""
    message = {"role": "assistant", "content": text}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason}
    if logps is not None:
        top = [{"token": token, "logprob": logp, "bytes": None} for token, logp in logps.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": top}]}
    return 200, json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def question(content: Mapping[str, Any]) -> str:
    """The question of a request."""
    (message,) = content["messages"]
    return str(message["content"])


def answers(content: Mapping[str, Any]) -> tuple[str, str]:
    """The answers A and B of the question of ours that compares two."""
    match = re.search(r"Answer A:\n\n(.*)\n\nAnswer B:\n\n(.*)\n\nExplain", question(content), re.S)
    assert match is not None
    return match[1], match[2]
