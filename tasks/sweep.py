"""The task that ranks the variants of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.tasks.graph import Step, metrics, submit
from alignment_core.errors import UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.recipes.methods.sweep import OF_TRAINING
from alignment_core.stages.variants import FailedVariant, Variant, VariantsConfig


def variants(
    label: str,
    metric: str,
    fields: Mapping[str, Mapping[str, Any]],
    measuring: Mapping[str, Step],
    failed: Mapping[str, str] = {},
) -> Step:
    """Rank variants, which set these ``fields``, by a ``metric`` of the stages that measure them; it waits for these.

    ``failed`` are variants without results, and why; the table ends with them. Without a ``metric`` they are ranked by the
    first of OF_TRAINING that all have. Raises UserError if one was not measured.
    """
    found = {name: metrics(step) for name, step in measuring.items()}
    known = {name: _numbers(one) for name, one in found.items() if one is not None}
    shared = set.intersection(*(set(one) for one in known.values())) if known else set()
    metric = metric or next((name for name in OF_TRAINING if name in shared or not known), OF_TRAINING[0])
    if known and metric not in shared:
        without = ", ".join(name for name, one in known.items() if metric not in one)
        raise UserError(
            f"rank_by: {metric!r} was not measured of {without}; all have {', '.join(sorted(shared)) or 'none'}"
        )
    rows = tuple(Variant(name=name, fields=dict(fields[name]), metrics=one) for name, one in known.items())
    lower_is_better = not higher_is_better(metric, next(iter(known.values()), None))
    without_results = tuple(
        FailedVariant(name=name, fields=dict(fields[name]), reason=why) for name, why in failed.items()
    )
    config = VariantsConfig(metric=metric, lower_is_better=lower_is_better, variants=rows, failed=without_results)
    step: Step = submit("variants", label, config, measuring)
    return step


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
