"""Stage: continued pre-training of a causal language model on blocks of documents."""

from __future__ import annotations

import math
from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import TRAINED, train

LARGEST = 700.0
"""Nats per token above which the perplexity overflows a float."""


class ContinuedPretrainingStageConfig(TrainingStageConfig):
    """How to train."""


def run(context: StageContext, config: ContinuedPretrainingStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.sft import Sft

    metrics = train(context, Sft(), config.training)
    for at in ("", ".first"):
        if f"test_loss{at}" in metrics:
            metrics[f"test_perplexity{at}"] = perplexity(metrics[f"test_loss{at}"])
    return metrics


def perplexity(nats: float) -> float:
    """exp(mean negative log-likelihood per token): n for a model that is as uncertain as a uniform choice among n tokens.

    Jelinek et al. 1977, "Perplexity — a measure of the difficulty of speech recognition tasks".
    """
    return math.exp(min(nats, LARGEST))


SHOWS = titles("test_perplexity", "test_loss", "loss")
STAGE = Stage(
    "continued_pretraining",
    1,
    TRAINED,
    ContinuedPretrainingStageConfig,
    run,
    SHOWS,
    packages=TRAINING_PACKAGES,
)
