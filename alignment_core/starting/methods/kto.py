"""`kto` from completions with a thumb up or down."""

from __future__ import annotations

from typing import Any

from alignment_core.starting.base import Facts, Start
from alignment_core.starting.sections import data, evaluation, training
from alignment_core.starting.text import Said


def sections(facts: Facts) -> dict[str, Any]:
    loss = {"beta": Said(0.1, "the lower, the further the policy may move")}
    section = {"data": data(facts), "loss": loss, "training": training(facts, 1e-6, 2e-4)}
    return {"kto": section, **evaluation(facts, verifier=False)}


START = Start(("unpaired",), sections, "answers with a thumb up or down each", 30, ("unpaired",))
