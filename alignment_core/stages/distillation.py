"""Stage: training of a student on a teacher's log-probabilities of text."""

from __future__ import annotations

from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, packages_of
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.sections.distillation import DistillationLossConfig


class DistillationStageConfig(StageConfig):
    """How to learn."""

    training: TrainingConfig
    loss: DistillationLossConfig

    def packages_used(self) -> tuple[str, ...]:
        return packages_of(self.training)


def run(context: StageContext, config: DistillationStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.distillation import Distillation

    return train(context, Distillation(config.loss), config.training)


SHOWS = titles("loss", "kl", "test_kl")
STAGE = Stage("distillation", 1, TRAINED, DistillationStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
