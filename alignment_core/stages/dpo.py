"""Stage: direct preference optimisation of a policy on pairs, against itself at the start or another reference."""

from __future__ import annotations

from typing import Any

from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.execution.training_loop import train
from alignment_core.recipes import DpoLossConfig, TrainingConfig


class DpoStageConfig(StageConfig):
    """How to optimise."""

    training: TrainingConfig
    loss: DpoLossConfig
    trust_remote_code: bool = False


def run(context: StageContext, config: DpoStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.dpo import Dpo

    return train(
        context,
        Dpo(config.loss),
        config.training,
        reference="reference" if "reference" in context.inputs else None,
        trust_remote_code=config.trust_remote_code,
    )


SHOWS = {"accuracy": "accuracy", "test_accuracy": "test accuracy", "margin": "margin", "loss": "loss"}
STAGE = Stage("dpo", 1, {"model": "model"}, DpoStageConfig, run, SHOWS)
