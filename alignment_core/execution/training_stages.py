"""Stages that train on fixed data: their common function and outputs.

Modules of stages import this one, also where nothing is trained, so torch is imported in :func:`train` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignment_core.artifacts.reference import MASTERS
from alignment_core.errors import DataError, UserError
from alignment_core.execution.base import StageContext
from alignment_core.execution.intermediate_checkpoints import CHECKPOINTS
from alignment_core.execution.metric_window import movement
from alignment_core.models.saving import ADAPTER

if TYPE_CHECKING:
    from alignment_core.recipes import TrainingConfig
    from alignment_core.recipes.sections.preference import ReferenceSyncConfig
    from alignment_core.training.methods.base import TrainingMethod

LAST = "last"
"""Output of the last checkpoint, where the best one is another."""
TRAINED = {"model": "model", LAST: "model", ADAPTER: "adapter", MASTERS: MASTERS, CHECKPOINTS: "model"}
"""The outputs of a stage that trains a policy; ``adapter`` of one with LoRA, ``masters`` of one in bf16."""


def train(
    context: StageContext,
    method: TrainingMethod,
    training: TrainingConfig,
    model: str = "model",
    sync: ReferenceSyncConfig | None = None,
    dropout: bool = False,
    neftune_noise_alpha: float = 0.0,
) -> dict[str, Any]:
    """Train the input of role ``model`` on the input ``data``; returns metrics.

    A method that needs a reference compares with the input ``reference_logps``, which the stage of this name makes of the same
    data. Raises DataError if rows that the training takes are missing in it. Metrics of held-out rows are ``test_<name>``, and
    ``test_<name>.first`` before the first step. With ``sync`` the reference is the input ``reference``, or the model itself,
    and follows the policy. With ``dropout`` the model's own dropout is on, and with ``neftune_noise_alpha`` embeddings are
    noisy.
    """
    from alignment_core.execution.training_loop import run_job
    from alignment_core.training.trainer import TrainJob

    fixed = method.needs_reference and sync is None
    if fixed and "reference_logps" not in context.inputs:
        raise UserError(
            "the method compares with a reference: give its stage the input reference_logps, which the stage of this name "
            "makes (alignment_core.composition.steps.reference_logps)"
        )
    data = context.inputs["data"]
    if not (data / "train.parquet").is_file():
        raise DataError("the data set holds no training rows")
    saves_masters = training.saves_masters and MASTERS in context.outputs
    job = TrainJob(
        method=method,
        model=context.model(model),
        reference_logps=context.inputs["reference_logps"] / "logps.parquet" if fixed else None,
        train_data=data / "train.parquet",
        test_data=data / "test.parquet" if (data / "test.parquet").is_file() else None,
        training=training,
        seed=context.seed,
        reference=context.model("reference") if "reference" in context.inputs else None,
        sync=sync,
        scratch=context.progress,
        masters=context.masters(model) if saves_masters else None,
        saves_masters=saves_masters,
        dropout=dropout,
        neftune_noise_alpha=neftune_noise_alpha,
    )
    if training.eval_steps and job.test_data is None:
        raise UserError("training.eval_steps: the data holds out no rows; set its `test_rows`, or leave the field out")
    metrics = run_job(context, job, context.outputs.get(LAST))
    moved, warnings = movement(context.inputs[model], context.output)
    if warnings:
        metrics["warnings"] = warnings
    return metrics | moved
