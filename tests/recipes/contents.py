"""Minimal recipes of each method, and the error of a refused one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core import methods
from alignment_core.errors import UserError
from alignment_core.recipes import BaseRecipe

METHODS = sorted(path.stem.replace("_", "-") for path in Path(methods.__file__).parent.glob("[!_]*.py"))
"""The names of our methods, which are those of their modules."""
SFT: dict[str, Any] = {"method": "sft", "name": "demo", "model": "some/model", "sft": {"data": "rows.jsonl"}}
ROUNDS: dict[str, Any] = {
    "method": "iterative-dpo",
    "name": "demo",
    "model": "some/model",
    "reward_model": {"data": "pairs.jsonl"},
    "iterative_dpo": {"prompts": "prompts.jsonl"},
}
JUDGE: dict[str, Any] = {
    "method": "reward-model",
    "name": "demo",
    "model": "m",
    "reward_model": {"data": "pairs.jsonl"},
}
NIGHT: dict[str, Any] = {
    "method": "nightly",
    "name": "demo",
    "model": "some/model",
    "dpo": {"data": "inbox"},
    "evaluation": {"prompts": "prompts.jsonl", "verifier": "checks.py:right"},
    "promotion": {"gates": [{"metric": "accuracy", "min_gain": 0}]},
}
RL: dict[str, Any] = {
    "method": "rl",
    "name": "demo",
    "model": "some/model",
    "rl": {"prompts": "prompts.jsonl", "rewards": [{"verifier": "checks.py:right"}]},
}
Load = Callable[..., BaseRecipe]


def refusal(load: Load, content: Any, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(content, *overrides)
    return str(caught.value)
