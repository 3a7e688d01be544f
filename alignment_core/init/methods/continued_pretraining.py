"""`continued-pretraining` from plain text."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import data, training


def sections(facts: Profile) -> dict[str, Any]:
    section = {"data": data(facts, documents=True), "training": training(facts, 1e-5, 1e-3)}
    return {"continued_pretraining": section}


START = Start(("documents",), sections, "plain text without prompts", 60, ("text",), learns=False, evaluates=False)
