"""`distillation` from demonstrations, on which a larger model is the teacher."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.models import USUAL
from alignment_core.init.sections import data, evaluation, training
from alignment_core.init.text import Said

TEACHER = "Qwen/Qwen2.5-1.5B-Instruct"
"""A larger one of the family of the usual student, with its tokenizer."""


def sections(facts: Profile) -> dict[str, Any]:
    teacher: Any = TEACHER if facts.model.name == USUAL else facts.model.name
    if facts.model.is_scratch:
        teacher = {"scratch": {"hidden_size": 128, "num_hidden_layers": 3}}
    section = {
        "teacher": {"model": Said(teacher, "a larger model with the student's tokenizer: put yours here")},
        "data": data(facts),
        "training": training(facts, 1e-5, 1e-3),
    }
    return {"distillation": section, **evaluation(facts)}


START = Start(
    ("demonstrations",), sections, "prompts with answers, on which a student learns a teacher's probabilities"
)
