"""Stage: supervised fine-tuning of a causal language model on demonstrations."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes.base import unkeyed


class SftStageConfig(TrainingStageConfig):
    """How to fine-tune."""

    disable_dropout: bool = Field(True, exclude_if=lambda disabled: disabled)
    neftune_noise_alpha: float = unkeyed(0.0)


def run(context: StageContext, config: SftStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.sft import Sft

    noise = config.neftune_noise_alpha
    return train(context, Sft(), config.training, dropout=not config.disable_dropout, neftune_noise_alpha=noise)


SHOWS = titles("loss", "test_loss")
STAGE = Stage("sft", 3, TRAINED, SftStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
