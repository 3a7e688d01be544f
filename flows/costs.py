"""The cost of a run and the outcome of its promotion, in words and cells of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from alignment_core.execution.base import StageResult
from alignment_core.execution.cost import PARTS, per_step, tokens, total

COSTS = (*PARTS.values(), "device-s", "tokens")


def cost_cells(cost: Mapping[str, float]) -> dict[str, str]:
    """The cells of a table by column; zeros are empty."""
    measured = [cost.get(name, 0.0) for name in (*PARTS, "device_seconds")]
    shown = [f"{value:.1f}" if value >= 0.05 else "" for value in measured]
    shown[len(PARTS) - 1] = f"{cost.get('seconds', 0.0):.1f}" if cost else ""
    shown.append(f"{tokens(cost):,.0f}")
    return dict(zip(COSTS, (text if text != "0" else "" for text in shown), strict=True))


def run_cost(stages: Iterable[StageResult]) -> dict[str, float]:
    """The cost of a run: cached stages cost nothing."""
    return total(stage.cost for stage in stages if stage.state == "run")


def step_rows(stages: Iterable[StageResult]) -> list[dict[str, str]]:
    """Seconds of a step by part, a row for each stage that ran in steps."""
    measured = {stage.label: per_step(stage.cost) for stage in stages if stage.state == "run"}
    names = sorted({name for parts in measured.values() for name in parts})
    return [
        {"stage": label, **{name: f"{parts[name]:.3f}" if name in parts else "" for name in names}}
        for label, parts in measured.items()
        if parts
    ]


def promotion_line(promotion: Mapping[str, Any]) -> str:
    """The outcome of the promotion with its baseline and reasons, and of the publication."""
    beside = f" (compared with {promotion['compared_with']})" if promotion.get("compared_with") else ""
    reasons = f": {'; '.join(promotion['reasons'])}" if promotion["reasons"] else ""
    return f"{promotion['tag']}: {promotion['state']}{beside}{reasons}{_publication(promotion.get('publication'))}"


def _publication(publication: Mapping[str, Any] | None) -> str:
    if publication is None:
        return ""
    if publication["state"] in ("failed", "superseded"):
        return f"; not published to {publication['repo']}: {'; '.join(publication['reasons'])}"
    return f"; {publication['repo']}: {publication['state']}, commit {publication['commit'][:12]}"
