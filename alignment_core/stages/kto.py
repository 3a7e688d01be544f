"""Stage: Kahneman–Tversky optimisation of a policy on labelled completions with known log-probabilities under a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageContext
from alignment_core.execution.packages import TRAINING_PACKAGES, TrainingStageConfig
from alignment_core.execution.training_stages import TRAINED, train
from alignment_core.recipes.sections.kto import KtoLossConfig

ADVISED = (1.0, 3 / 2)
"""Weighted desirable rows per weighted undesirable one: Ethayarajh et al. 2024, equation 9 (in the first version up to 4/3)."""
TOLERANCE = 0.05
"""Relative deviation from that range without a warning: sampled labels are never exactly balanced."""


class KtoStageConfig(TrainingStageConfig):
    """How to optimise."""

    loss: KtoLossConfig


def run(context: StageContext, config: KtoStageConfig) -> dict[str, Any]:
    from alignment_core.training.methods.kto import Kto

    metrics = train(
        context, Kto(config.loss, bf16=config.training.bf16), config.training, sync=config.loss.sync_ref_model
    )
    labels = _labels(context)
    desirable, undesirable = sum(labels), len(labels) - sum(labels)
    if warnings := [*imbalance(desirable, undesirable, config.loss), *metrics.pop("warnings", ())]:
        metrics["warnings"] = warnings
    return {**metrics, "desirable_rows": desirable, "undesirable_rows": undesirable}


def _labels(context: StageContext) -> list[bool]:
    import pyarrow.parquet as pq

    from alignment_core.columns import column

    return column(pq.read_table(context.inputs["data"] / "train.parquet", columns=["label"]), "label")


def imbalance(desirable: int, undesirable: int, loss: KtoLossConfig) -> Sequence[str]:
    """A warning if one label is missing, or weighs more than the paper advises."""
    if not desirable or not undesirable:
        missing = "undesirable" if desirable else "desirable"
        return [
            f"no row is {missing}: with one label alone, KTO makes all completions "
            f"{'more' if desirable else 'less'} likely whatever they are; add {missing} rows"
        ]
    least, most = ADVISED
    ratio = loss.desirable_weight * desirable / (loss.undesirable_weight * undesirable)
    if least * (1 - TOLERANCE) <= ratio <= most * (1 + TOLERANCE):
        return []
    even = undesirable * loss.undesirable_weight / desirable
    return [
        f"{desirable} desirable and {undesirable} undesirable rows weigh {ratio:.3g} to 1, and KTO's authors advise between 1 "
        f"and 3/2: set kto.loss.desirable_weight between {least * even:.3g} and {most * even:.3g}, or undesirable_weight to "
        "the same effect"
    ]


SHOWS = titles("accuracy", "test_accuracy", "margin", "baseline", "loss")
STAGE = Stage("kto", 1, TRAINED, KtoStageConfig, run, SHOWS, packages=TRAINING_PACKAGES)
