"""Stage: direct preference optimisation of a policy on pairs with known log-probabilities under a reference."""

from __future__ import annotations

from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes import DpoLossConfig


class DpoStageConfig(TrainingStageConfig):
    """How to optimise."""

    loss: DpoLossConfig


def run(context: StageContext, config: DpoStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.dpo import Dpo
    from alignment_core.training.methods.dpo_beta import DynamicDpo

    method = (DynamicDpo if config.loss.beta_changes else Dpo)(config.loss, config.training.bf16)
    return train(context, method, config.training, sync=config.loss.sync_ref_model)


SHOWS = titles("accuracy", "test_accuracy", "margin", "loss")
STAGE = Stage("dpo", 3, TRAINED, DpoStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
