"""Tasks that train a model."""

from __future__ import annotations

from alignment_core.recipes import DpoLossConfig, RewardModelConfig, TrainingConfig
from alignment_core.stages.dpo import DpoStageConfig
from alignment_core.stages.reward_model import RewardModelStageConfig
from alignment_core.stages.sft import SftStageConfig
from tasks.graph import Input, Step, submit


def sft(label: str, training: TrainingConfig, model: Input, data: Input) -> Step:
    """Fine-tune ``model`` on demonstrations."""
    config = SftStageConfig(training=training)
    return submit("sft", label, config, {"model": model, "data": data})


def reward_model(label: str, section: RewardModelConfig, model: Input, data: Input) -> Step:
    """Train a reward model that starts from ``model``."""
    config = RewardModelStageConfig(training=section.training, loss_type=section.loss_type)
    return submit("reward_model", label, config, {"model": model, "data": data})


def dpo(
    label: str,
    training: TrainingConfig,
    loss: DpoLossConfig,
    policy: Input,
    data: Input,
    reference: Input | None = None,
    stream: str = "",
) -> Step:
    """Optimise ``policy`` on pairs; without a ``reference`` it is its own at the start."""
    config = DpoStageConfig(training=training, loss=loss)
    return submit("dpo", label, config, {"model": policy, "data": data, "reference": reference}, stream)
