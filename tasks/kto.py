"""The task that trains on labelled completions."""

from __future__ import annotations

from alignment.tasks.graph import Input, Step, submit
from alignment.tasks.training import reference_logps
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.stages.kto import KtoStageConfig


def kto(
    label: str,
    training: TrainingConfig,
    loss: KtoLossConfig,
    policy: Input,
    data: Input,
    reference: Input | None = None,
    stream: str = "",
) -> Step:
    """Optimise ``policy`` on labelled completions; without a ``reference`` it is its own at the start."""
    logps = reference_logps(
        f"{label}/reference-logps",
        "kto",
        training,
        policy,
        reference,
        data,
        stream,
        completions=("completion",),
        mismatched=loss.loss_type == "kto",
    )
    config = KtoStageConfig(training=training, loss=loss)
    return submit("kto", label, config, {"model": policy, "data": data, "reference_logps": logps}, stream)
