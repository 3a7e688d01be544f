"""`reward-model` from preference pairs."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import data, training


def sections(facts: Profile) -> dict[str, Any]:
    return {"reward_model": {"data": data(facts), "training": training(facts, 1e-5, 1e-3)}}


WHY = "pairs of a better and a worse answer, to judge others by"
START = Start(("preferences",), sections, WHY, evaluates=False, promotes=False)
