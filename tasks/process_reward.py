"""Tasks of process reward models."""

from __future__ import annotations

from collections.abc import Sequence

from alignment.tasks.data import dataset
from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes.sections.process_reward_model import ProcessRewardModelConfig
from alignment_core.stages.best_of_n import BestOfNConfig
from alignment_core.stages.process_reward_model import ProcessRewardModelStageConfig


def process_reward_model(label: str, section: ProcessRewardModelConfig, model: Input, tokenizer: Input) -> Step:
    """Train a process reward model that starts from ``model``."""
    layout = section.steps.model_dump(include={"separator", "placeholder"})
    rows = dataset(f"{label}/data", section.data, "stepwise", tokenizer, settings=layout)
    config = ProcessRewardModelStageConfig(training=section.training, steps=section.steps)
    return submit("process_reward_model", label, config, {"model": model, "data": rows})


def best_of_n(label: str, rewards: Sequence[str], confidence: float, scores: Input) -> Step:
    """What the best of n completions are worth, chosen by each of the ``rewards`` of the scores."""
    return submit("best_of_n", label, BestOfNConfig(rewards=tuple(rewards), confidence=confidence), {"scores": scores})
