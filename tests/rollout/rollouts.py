"""Completions for tests: rollouts of which only some fields matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from alignment_core.rollout.rollout import Rollout


def rollout(loss_mask: list[bool], **fields: Any) -> Rollout:
    """A completion of as many tokens; fields that are not given have values that do not matter."""
    tokens = len(loss_mask)
    values: dict[str, Any] = {
        "prompt": 0,
        "group": 0,
        "sample": 0,
        "prompt_ids": [1],
        "completion_ids": np.arange(tokens, dtype=np.int32),
        "logps": np.zeros(tokens, np.float32),
        "versions": np.zeros(tokens, np.int32),
        "finish_reason": "stop",
        "tokens_left": 254,
        "prompt_text": "?",
        "completion_text": "",
        "label": None,
        "task": None,
        "messages": None,
        "tools": None,
        "columns": None,
        "source": "p.jsonl:1",
        "policy": "policy",
    }
    return Rollout(loss_mask=np.array(loss_mask, bool), **{**values, **fields})
