"""Distillation: teacher, text and divergence."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import EVALUATION_FIELDS, SftConfig, TrainingConfig


class TeacherConfig(Config):
    """The model to learn from, with the student's tokenizer."""

    model: ModelConfig
    """The teacher model."""
    sft: SftConfig | None = None
    """Fine-tune it on demonstrations first."""


class OnPolicyConfig(Config):
    """Rounds on the student's own completions."""

    prompts: DataConfig
    """Prompts for the student; every round takes the next slice."""
    rounds: int = Field(1, ge=1)
    """Number of rounds."""
    prompts_per_round: int = Field(1024, ge=1)
    """Number of prompts in each round."""
    generation: GenerationConfig = GenerationConfig(num_generations=1)
    """Sampling parameters."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule of one round."""


class DistillationLossConfig(Config):
    """Divergence between student and teacher."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """`forward_kl`: of the teacher to the student, `reverse_kl`: of the student to the teacher, `jsd`: of both to their mixture
    (generalised Jensen–Shannon)."""
    jsd_beta: float = Field(0.5, gt=0, lt=1)
    """β: the teacher's share of the mixture; only with `jsd`. Towards 0 it acts like forward KL, towards 1 like reverse KL."""
    nll_weight: float = Field(0.0, ge=0)
    """Weight of the text's negative log-likelihood per token, which is added to the divergence."""

    @model_validator(mode="after")
    def _mixes(self, info: ValidationInfo) -> DistillationLossConfig:
        if self.divergence != "jsd":
            self.refuse_unused(info, ("jsd_beta",), f"with `divergence: {self.divergence}`")
        return self


class DistillationConfig(Config):
    """Distillation of a teacher into a student, on given text, on the student's own completions, or on both in turn."""

    teacher: TeacherConfig
    """The teacher."""
    top_k: int = Field(64, ge=1, le=4096)
    """Number of the teacher's most likely tokens that are kept at each position; all others are summed into one. The size
    of the vocabulary gives the exact divergence."""
    loss: DistillationLossConfig = DistillationLossConfig()
    """The divergence."""
    data: DataConfig | None = None
    """Demonstrations to distill on."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule on `data`."""
    on_policy: OnPolicyConfig | None = None
    """Rounds on the student's own completions, after `data` if there is any."""

    @model_validator(mode="after")
    def _has_text(self, info: ValidationInfo) -> DistillationConfig:
        if self.data is None and self.on_policy is None:
            raise ValueError("`distillation` needs text: `data` (given), `on_policy` (the student's own), or both")
        if self.data is None:
            self.refuse_unused(info, ("training",), "without `data`: the rounds have `on_policy.training`")
        else:
            self.training.check_held_out(self.data)
        if self.on_policy is not None:
            self.on_policy.training.refuse_unused(
                info,
                EVALUATION_FIELDS,
                "in `distillation.on_policy.training`: the completions of a round hold out no rows",
            )
        return self
