"""Task that continues a model's pre-training."""

from __future__ import annotations

from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes import TrainingConfig
from alignment_core.stages.continued_pretraining import ContinuedPretrainingStageConfig


def continued_pretraining(label: str, training: TrainingConfig, model: Input, data: Input) -> Step:
    """Train ``model`` on every token of documents."""
    config = ContinuedPretrainingStageConfig(training=training)
    step: Step = submit("continued_pretraining", label, config, {"model": model, "data": data})
    return step
