"""`conditional-sft` from prompts with an answer that a verifier compares with."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.sections import answer_room, check_verified, evaluation, generation, prompts, training
from alignment_core.init.text import Said


def sections(facts: Profile) -> dict[str, Any]:
    verifier, room = check_verified(facts, "conditional-sft"), answer_room(facts, least=128)
    correct = {"reward": {"verifier": verifier}, "decimals": 0}
    asked = prompts(facts, facts.all_sources, room)
    section = {
        "prompts": {**asked, "max_length": Said(asked["max_length"].value + room, "tokens of prompt and answer")},
        "generation": generation(4, room),
        "attributes": {"correct": Said(correct, "what the verifier says of each answer")},
        "template": Said("{prompt} [correct={correct}]", "how it is written into the prompt"),
        "wanted": [Said({"correct": 1}, "what the trained policy is asked for")],
        "training": training(facts, 1e-5, 1e-3),
    }
    return {"conditional_sft": section, **evaluation(facts)}


START = Start(("prompts",), sections, "prompts with a right answer each, which a verifier can compare with")
