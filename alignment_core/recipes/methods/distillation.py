"""The method ``distillation``: a small model learns from the probabilities of a larger one."""

from __future__ import annotations

from typing import Literal

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.distillation import DistillationConfig
from alignment_core.recipes.sections.training import SftConfig


class DistillationRecipe(BaseRecipe):
    """Teacher → its log-probabilities of text → student → evaluation of both → promotion."""

    method: Literal["distillation"] = "distillation"
    """Distillation of a teacher into `model`, the student."""
    sft: SftConfig | None = None
    """Fine-tune the student on demonstrations first."""
    distillation: DistillationConfig
    """The teacher, the text and training."""

    @property
    def samples(self) -> bool:
        """The student answers prompts."""
        return self.evaluation is not None or self.distillation.on_policy is not None


METHOD = Method(
    DistillationRecipe,
    composition="alignment.flows.distillation:distillation",
    aliases=("gkd", "knowledge-distillation", "minillm"),
    decides={
        "teacher": "distillation.teacher.model",
        r"teacher/sft(/data)?": "distillation.teacher.sft",
        "distillation/data": "distillation.data",
        "distillation/prompts": "distillation.on_policy.prompts",
        r"distillation(/round-\d+)?/teacher-logps": "distillation",
        r"distillation/round-\d+/sample:prompts": "distillation.on_policy.prompts_per_round",
        r"distillation/round-\d+/sample:first_prompt": "the first prompt",
        r"distillation/round-\d+/sample": "distillation.on_policy",
        r"distillation/round-\d+": "distillation.on_policy",
        "distillation": "distillation",
    },
)
