"""Stage: training of a student on a teacher's log-probabilities of text."""

from __future__ import annotations

from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes.sections.distillation import DistillationLossConfig


class DistillationStageConfig(TrainingStageConfig):
    """How to learn."""

    loss: DistillationLossConfig


def run(context: StageContext, config: DistillationStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.distillation import Distillation

    return train(context, Distillation(config.loss), config.training)


SHOWS = titles("loss", "kl", "test_kl")
STAGE = Stage("distillation", 1, TRAINED, DistillationStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
