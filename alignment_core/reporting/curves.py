"""Curves: a stage's key metrics over its steps, rounds on top of each other; and the policies' metrics in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from alignment_core.reporting.drawing import as_svg, new_figure
from alignment_core.tracking.metrics_file import Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 2.6


@as_svg
def over_steps(shows: Mapping[str, str], stages: Mapping[str, Points]) -> Figure | None:
    """A panel for each key metric that was reported while the stages ran, a line for each stage; None without any.

    ``shows`` are the metrics' titles by name, ``stages`` the reports by label, see :func:`read_points`.
    """
    panels = {
        name: {label: found for label, points in stages.items() if (found := _of(name, points))} for name in shows
    }
    panels = {name: lines for name, lines in panels.items() if lines}
    if not panels:
        return None
    drawn = new_figure(PANEL_INCHES * len(panels) + 0.4, 2.2)
    for axes, (name, lines) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, points in lines.items():
            few = {"marker": "."} if len(points) < 20 else {}
            axes.plot(*zip(*points, strict=True), linewidth=1.2, label=label, **few)
        axes.set_title(shows[name])
        axes.set_xlabel("steps")
        axes.locator_params(axis="x", integer=True, nbins=6)
        if len(lines) > 1 and name == next(iter(panels)):
            axes.legend(frameon=False, fontsize=7)
    return drawn


@as_svg
def over_policies(columns: Mapping[str, str], policies: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A panel for each metric of the evaluations, with intervals, over the policies in their order; None without any.

    ``columns`` are the metrics' titles by name. ``<name>.low`` and ``.high`` are the ends of an interval.
    """
    panels = {
        name: {label: metrics for label, metrics in policies.items() if name in metrics}
        for name in columns
        if any(name in metrics for metrics in policies.values())
    }
    if not panels or len(policies) < 2:
        return None
    drawn = new_figure(PANEL_INCHES * len(panels) + 0.4, 2.4)
    for axes, (name, found) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        positions = [list(policies).index(label) for label in found]
        values = [metrics[name] for metrics in found.values()]
        below = [metrics[name] - metrics.get(f"{name}.low", metrics[name]) for metrics in found.values()]
        above = [metrics.get(f"{name}.high", metrics[name]) - metrics[name] for metrics in found.values()]
        axes.errorbar(positions, values, yerr=[below, above], marker="o", markersize=4, capsize=3, linewidth=1.2)
        axes.set_xticks(range(len(policies)), list(policies), rotation=30, ha="right")
        axes.set_title(columns[name])
    return drawn


def _of(name: str, points: Points) -> list[tuple[float, float]]:
    return [(step, metrics[name]) for step, metrics in points if name in metrics]
