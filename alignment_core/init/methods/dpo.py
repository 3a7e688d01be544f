"""`dpo` from preference pairs."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import data, evaluation, training
from alignment_core.init.text import Said


def sections(facts: Profile) -> dict[str, Any]:
    loss = {"beta": Said(0.1, "the lower, the further the policy may move")}
    section = {"data": data(facts), "loss": loss, "training": training(facts, 1e-6, 2e-4)}
    return {"dpo": section, **evaluation(facts, verifier=False)}


START = Start(("preferences",), sections, "pairs of a better and a worse answer", 20, ("preference", "hh"))
