"""Stage: a reward model from preference pairs; loads with ``AutoModelForSequenceClassification``."""

from __future__ import annotations

import json
from typing import Any, Literal

from alignment_core.evaluation.files import HELD_OUT
from alignment_core.execution.base import Stage, StageConfig, StageContext, below
from alignment_core.execution.training_loop import LAST, TRAINING_PACKAGES, TRAINS, packages_of, train
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import TrainingConfig


class RewardModelStageConfig(StageConfig):
    """How to train the reward model."""

    training: TrainingConfig
    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"

    def packages_used(self) -> tuple[str, ...]:
        return packages_of(self.training)


def run(context: StageContext, config: RewardModelStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.reward_model import RewardModel

    method = RewardModel(config.loss_type)
    metrics = train(context, method, config.training)
    held_out = {name: value for name, value in metrics.items() if name.startswith("test_")}
    (context.output / HELD_OUT).write_text(json.dumps(held_out, indent=2, sort_keys=True) + "\n")
    return metrics


SHOWS = {"test_accuracy": "test accuracy", "accuracy": "accuracy", "loss": "loss"}
CODE = (
    *TRAINS,
    "alignment_core.evaluation.files",
    "alignment_core.losses.reward",
    *below("alignment_core.training.methods", "pairs reward_model"),
)
STAGE = Stage(
    "reward_model",
    3,
    {"reward-model": "reward-model", LAST: "reward-model", ADAPTER: "adapter"},
    RewardModelStageConfig,
    run,
    SHOWS,
    code=CODE,
    packages=TRAINING_PACKAGES,
)
