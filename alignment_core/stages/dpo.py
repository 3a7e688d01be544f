"""Stage: direct preference optimisation of a policy on pairs with known log-probabilities under a reference."""

from __future__ import annotations

from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, packages_of
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes import DpoLossConfig, TrainingConfig


class DpoStageConfig(StageConfig):
    """How to optimise."""

    training: TrainingConfig
    loss: DpoLossConfig

    def packages_used(self) -> tuple[str, ...]:
        return packages_of(self.training)


def run(context: StageContext, config: DpoStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.dpo import Dpo
    from alignment_core.training.methods.dpo_beta import DynamicDpo

    method = (DynamicDpo if config.loss.beta_changes else Dpo)(config.loss, config.training.bf16)
    return train(context, method, config.training, sync=config.loss.sync_reference)


SHOWS = titles("accuracy", "test_accuracy", "margin", "loss")
STAGE = Stage("dpo", 3, TRAINED, DpoStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
