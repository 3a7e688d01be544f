"""`generate` from prompts alone: there is nothing to train on."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import answer_room, generation, prompts


def sections(facts: Profile) -> dict[str, Any]:
    room = answer_room(facts, least=256)
    return {"generate": {"prompts": prompts(facts, facts.sources, room), "generation": generation(1, room)}}


WHY = "prompts with nothing to learn from, which the model can only answer"
START = Start(("prompts",), sections, WHY, 70, ("prompts", "messages"), learns=False, evaluates=False, promotes=False)
