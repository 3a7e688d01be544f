"""Stage: a reward model from preference pairs; loads with ``AutoModelForSequenceClassification``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from alignment_core.evaluation.files import HELD_OUT, SPREAD
from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.forward_passes import ForwardPasses
from alignment_core.execution.intermediate_checkpoints import CHECKPOINTS
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import LAST, train
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.base import unkeyed

MEASURED_ROWS = 512
"""Training rows whose completions give mean and deviation of the rewards."""
BLOCK = 256
"""Completions per block of one rank."""


class RewardModelStageConfig(TrainingStageConfig):
    """How to train the reward model."""

    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    center_rewards_coefficient: float = unkeyed(0.0)


def run(context: StageContext, config: RewardModelStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.reward_model import RewardModel

    method = RewardModel(config.loss_type, config.training.bf16, config.center_rewards_coefficient)
    metrics = train(context, method, config.training)
    held_out = {name: metrics[name] for name in metrics if name.startswith("test_") and not name.endswith(".first")}
    (context.output / HELD_OUT).write_text(json.dumps(held_out, indent=2, sort_keys=True) + "\n")
    return {**metrics, **_write_spreads(context)}


def _write_spreads(context: StageContext) -> dict[str, float]:
    """Write mean and deviation of each model's rewards of training completions beside its weights; returns the result's."""
    import pyarrow.parquet as pq

    from alignment_core.training.methods.pairs import pair_rows

    rows = pair_rows(pq.read_table(context.inputs["data"] / "train.parquet").slice(0, MEASURED_ROWS))
    pairs = [(sequence.ids[:-1], sequence.ids[-1:]) for row in rows for sequence in row.sequences]
    passes = ForwardPasses(context, BLOCK)
    spreads: dict[str, dict[str, float]] = {}
    with passes.using_trainers():
        for name, folder in context.outputs.items():
            if (folder / "config.json").is_file():
                model = replace(context.model("model"), path=folder)
                scores = passes(model, "score", f"trained-{name}", pairs).astype(np.float64)
                spreads[name] = {"mean": float(f"{scores.mean():.6g}"), "deviation": float(f"{scores.std():.6g}")}
    spread = next(iter(spreads.values()))
    if ADAPTER in context.outputs and any(context.outputs[ADAPTER].iterdir()):
        spreads[ADAPTER] = spread  # merged, it is the result
    for name, of_model in spreads.items():
        content = json.dumps({**of_model, "answers": len(pairs)}, indent=2, sort_keys=True)
        (context.outputs[name] / SPREAD).write_text(f"{content}\n")
    return {f"reward_{name}": value for name, value in spread.items()}


SHOWS = titles("test_accuracy", "accuracy", "loss")
STAGE = Stage(
    "reward_model",
    4,
    {"reward-model": "reward-model", LAST: "reward-model", ADAPTER: "adapter", CHECKPOINTS: "reward-model"},
    RewardModelStageConfig,
    run,
    SHOWS,
    packages=TRAINING_PACKAGES,
)
