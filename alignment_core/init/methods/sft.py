"""`sft` from demonstrations."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import data, evaluation, training


def sections(facts: Profile) -> dict[str, Any]:
    return {"sft": {"data": data(facts), "training": training(facts, 1e-5, 1e-3)}, **evaluation(facts)}


START = Start(
    ("demonstrations",), sections, "prompts with an answer each to imitate", 50, ("messages", "prompt_completion")
)
