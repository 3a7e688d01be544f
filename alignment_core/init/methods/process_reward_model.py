"""`process-reward-model` from answers with a label for each step."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import data, training
from alignment_core.recipes.sections.process_reward_model import StepsConfig


def sections(facts: Profile) -> dict[str, Any]:
    return {"process_reward_model": {"data": data(facts), "training": training(facts, 1e-5, 1e-3)}}


WHY = "answers in steps, with a label for each step"
FORMATS = ("stepwise", "math_shepherd")
STEPS = StepsConfig().model_dump(exclude={"verdict_tokens"})
START = Start(("stepwise",), sections, WHY, 10, FORMATS, evaluates=False, promotes=False, settings=STEPS)
