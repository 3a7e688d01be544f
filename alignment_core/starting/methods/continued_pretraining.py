"""`continued-pretraining` from plain text."""

from __future__ import annotations

from typing import Any

from alignment_core.starting.base import Facts, Start
from alignment_core.starting.sections import data, training


def sections(facts: Facts) -> dict[str, Any]:
    section = {"data": data(facts, documents=True), "training": training(facts, 1e-5, 1e-3)}
    return {"continued_pretraining": section}


START = Start(("documents",), sections, "plain text without prompts", 60, ("text",), learns=False, evaluates=False)
