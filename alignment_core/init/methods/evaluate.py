"""`evaluate`: a model's answers to prompts, and which of them are right."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import answer_room, decoding, generation, prompts
from alignment_core.init.text import Said


def sections(facts: Profile) -> dict[str, Any]:
    room = answer_room(facts, least=256)
    section: dict[str, Any] = {"prompts": prompts(facts, facts.sources, room), "generation": generation(1, room)}
    if facts.verifier:
        section["verifier"] = Said(facts.verifier, "says which answers are right, by the label")
    section["generation"] |= decoding("verifier" in section)
    others = Said({}, "others to compare with, such as {tuned: policy/production}")
    return {"evaluation": section, "models": others}


START = Start(("prompts",), sections, "prompts to measure models on", evaluates=False, promotes=False)
