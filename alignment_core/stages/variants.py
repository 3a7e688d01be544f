"""Stage: metrics of the variants of a sweep → a table, best first, and the best variant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.printable import markdown_line
from alignment_core.recipes.sections.evaluation import OF_TRAINING
from alignment_core.stages.report import cell, columns_of

FILE = "variants.json"
SECTION = "section.md"
"""File of artifacts of the kind ``section``, which reports of runs show."""


class Variant(StageConfig):
    """A variant of the sweep."""

    name: str
    fields: dict[str, Any]
    """Fields that it sets."""
    metrics: dict[str, float]
    """Its metrics, which include the one for ranking."""


class FailedVariant(StageConfig):
    """A variant of the sweep that has no results."""

    name: str
    fields: dict[str, Any]
    """Fields that it sets."""
    reason: str
    """Reason of the failure."""


class VariantsConfig(StageConfig):
    """The variants to rank. Inputs are their evaluations or models, by name."""

    metric: str
    lower_is_better: bool = False
    variants: tuple[Variant, ...]
    failed: tuple[FailedVariant, ...] = Field((), exclude_if=lambda failed: not failed)


def run(context: StageContext, config: VariantsConfig) -> dict[str, Any]:
    ranked = sorted(
        config.variants, key=lambda variant: variant.metrics[config.metric] * (1 if config.lower_is_better else -1)
    )
    rows = _rows(config, ranked)
    content = {"metric": config.metric, "lower_is_better": config.lower_is_better, "variants": rows}
    (context.output / FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (context.output / SECTION).write_text(_markdown(config, ranked))
    best = ranked[0]
    return {"best": best.name, config.metric: best.metrics[config.metric], "metric": config.metric, "variants": rows}


def _rows(config: VariantsConfig, ranked: list[Variant]) -> list[dict[str, Any]]:
    """The variants as plain data, best first; failed ones are last, with the reason and without metrics."""
    failed = [
        {"name": variant.name, "fields": variant.fields, "metrics": {}, "failed": variant.reason}
        for variant in config.failed
    ]
    return [*(variant.model_dump(mode="json") for variant in ranked), *failed]


def table(metric: str, variants: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of variants, which are plain data: fields and metrics, with ``metric`` first.

    If a variant failed, a last column has the reason.
    """
    measured = {variant["name"]: variant["metrics"] for variant in variants}
    known = dict(columns_of(measured)) or dict.fromkeys(OF_TRAINING)
    shown = [name for name in dict.fromkeys((metric, *known)) if any(name in metrics for metrics in measured.values())]
    head = [*variants[0]["fields"], *(known.get(name) or name for name in shown)]
    rows = [
        [*map(json.dumps, variant["fields"].values()), *(cell(variant["metrics"], name) for name in shown)]
        for variant in variants
    ]
    if any(variant.get("failed") for variant in variants):
        head.append("failed")
        rows = [
            [*row, " ".join(str(variant.get("failed", "")).split())]
            for row, variant in zip(rows, variants, strict=True)
        ]
    return head, rows


def _markdown(config: VariantsConfig, ranked: list[Variant]) -> str:
    head, rows = table(config.metric, _rows(config, ranked))
    titles, *cells = (f"| {' | '.join(map(markdown_line, row))} |" for row in (head, *rows))
    lines = ["## Variants, best first", "", titles, "|---" * len(head) + "|", *cells]
    lines += ["", f"Ranked by `{config.metric}`{', the lower the better' if config.lower_is_better else ''}."]
    if close := [variant.name for variant in ranked[1:] if _overlap(ranked[0], variant, config.metric)]:
        lines += ["", f"The interval of the best overlaps that of {', '.join(close)}: their order may be chance."]
    return "\n".join(lines) + "\n"


def _overlap(best: Variant, other: Variant, metric: str) -> bool:
    ends = [(of.metrics.get(f"{metric}.low"), of.metrics.get(f"{metric}.high")) for of in (best, other)]
    (low, high), (other_low, other_high) = ends
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return low <= other_high and other_low <= high


SHOWS = {"best": "best"}
STAGE = Stage("variants", 1, {"variants": "section"}, VariantsConfig, run, SHOWS)
