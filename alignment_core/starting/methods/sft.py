"""`sft` from demonstrations."""

from __future__ import annotations

from typing import Any

from alignment_core.starting.base import Facts, Start
from alignment_core.starting.sections import data, evaluation, training


def sections(facts: Facts) -> dict[str, Any]:
    return {"sft": {"data": data(facts), "training": training(facts, 1e-5, 1e-3)}, **evaluation(facts)}


START = Start(
    ("demonstrations",), sections, "prompts with an answer each to imitate", 50, ("messages", "prompt_completion")
)
