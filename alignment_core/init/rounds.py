"""The sections of methods that repeat sampling, scoring and training; a verifier scores, or a reward model."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile
from alignment_core.init.sections import (
    answer_room,
    check_verified,
    data,
    decoding,
    evaluation,
    generation,
    prompts,
    training,
)
from alignment_core.init.text import Commented


def rounds(
    profile: Profile, method: str, field: str, rates: tuple[float, float], verified: dict[str, Any]
) -> dict[str, Any]:
    """The sections. ``rates`` are the learning rates of a trained and of a new model; ``verified`` are further fields of
    `selection` if a verifier scores."""
    pairs = profile.mapping.kind == "preferences"
    verifier = None if pairs else check_verified(profile, method)
    room = answer_room(profile, least=32 if profile.model.is_scratch else 128)
    section: dict[str, Any] = {
        "rounds": 2,
        "prompts": prompts(profile, profile.all_sources, room),
        "prompts_per_round": Commented(min(1024, profile.rows.count), "each round takes the next ones"),
        "generation": generation(8 if profile.machine.gpus else 4, room),
        **({} if pairs else {"selection": {"score": "verifier", **verified}}),
        "training": training(profile, *rates),
    }
    judged = evaluation(profile)
    if verifier and not judged:
        section_of_verifier = {
            "prompts": prompts(profile, profile.sources, room),
            "generation": {**generation(1, room), **decoding(scored=True)},
            "verifier": verifier,
        }
        judged = {"evaluation": section_of_verifier}
    reward_model = {"reward_model": {"data": data(profile), "training": training(profile, 1e-5, 1e-3)}} if pairs else {}
    return {**reward_model, field: section, **judged}
