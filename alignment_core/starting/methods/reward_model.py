"""`reward-model` from preference pairs."""

from __future__ import annotations

from typing import Any

from alignment_core.starting.base import Facts, Start
from alignment_core.starting.sections import data, training


def sections(facts: Facts) -> dict[str, Any]:
    return {"reward_model": {"data": data(facts), "training": training(facts, 1e-5, 1e-3)}}


WHY = "pairs of a better and a worse answer, to judge others by"
START = Start(("preferences",), sections, WHY, evaluates=False, promotes=False)
