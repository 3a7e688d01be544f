"""Tasks that train a model."""

from __future__ import annotations

from alignment.tasks.graph import CURRENT, Input, Step, submit
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import stage_seed
from alignment_core.recipes import DpoLossConfig, RewardModelConfig, TrainingConfig
from alignment_core.stages.dpo import DpoStageConfig
from alignment_core.stages.reference_logps import PAIRS, ReferenceLogpsConfig
from alignment_core.stages.reward_model import RewardModelStageConfig
from alignment_core.stages.sft import SftStageConfig


def sft(
    label: str, training: TrainingConfig, model: Input, data: Input, stream: str = "", disable_dropout: bool = True
) -> Step:
    """Fine-tune ``model`` on demonstrations."""
    config = SftStageConfig(training=training, disable_dropout=disable_dropout)
    return submit("sft", label, config, {"model": model, "data": data}, stream)


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
    """Optimise ``policy`` on pairs; without a ``reference`` it is its own at the start, if the loss needs one."""
    config = DpoStageConfig(training=training, loss=loss)
    if loss.sync_reference:
        return submit("dpo", label, config, {"model": policy, "data": data, "reference": reference}, stream)
    logps = None
    if loss.needs_reference:
        before = f"{label.removesuffix('/dpo')}/reference-logps"
        logps = reference_logps(before, "dpo", training, policy, reference, data, stream)
    return submit("dpo", label, config, {"model": policy, "data": data, "reference_logps": logps}, stream)


def reference_logps(
    label: str,
    stage: str,
    training: TrainingConfig,
    policy: Input,
    reference: Input | None,
    data: Input,
    stream: str = "",
    completions: tuple[str, ...] = PAIRS,
    mismatched: bool = False,
) -> Step:
    """Log-probabilities under ``reference``, or the ``policy`` as its training starts, of the rows that a stage of the kind
    ``stage`` takes: of these ``completions``, and of ``mismatched`` ones."""
    in_4bit = reference is None and training.in_4bit
    config = ReferenceLogpsConfig(
        bf16=training.bf16, load_in_4bit=in_4bit, completions=completions, mismatched=mismatched
    )
    if training.max_steps is not None:  # whether that is below an epoch is known once the pairs are there
        trains = StageCall(stage=stage, label=label, config={}, inputs={}, seed=CURRENT.get().seed, stream=stream)
        taken = {"max_steps": training.max_steps, "batch_size": training.batch_size, "order": stage_seed(trains)}
        config = config.model_copy(update=taken)
    return submit("reference_logps", label, config, {"model": policy if reference is None else reference, "data": data})
