"""Plots: the key metrics of stages over their steps, all rounds in one panel; and the metrics of the policies in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from alignment_core.evaluation.metric_names import OTHER, in_order, is_curve, metric_of
from alignment_core.reporting.drawing import as_svg, new_figure
from alignment_core.tracking.metrics_file import Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 2.6
PANELS = 4
"""Panels in a row."""


@as_svg
def over_steps(shows: Mapping[str, str], stages: Mapping[str, Points]) -> Figure | None:
    """A panel for each reported metric that is a curve or a key metric, with a line for each stage; None without such metrics.

    ``shows`` are the key metrics' titles by name, ``stages`` the reports by label, see :func:`read_points`.
    """
    reported = {name for points in stages.values() for _, metrics in points for name in metrics}
    panels = {
        name: {label: line for label, points in stages.items() if (line := _of(name, points))}
        for name in in_order(name for name in reported if name in shows or is_curve(name))
    }
    if not panels:
        return None
    columns = min(PANELS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(PANEL_INCHES * columns + 0.4, 2.2 * rows)
    subplots = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in subplots[len(panels) :]:
        unused.set_axis_off()
    for axes, (name, lines) in zip(subplots, panels.items(), strict=False):
        for label, points in lines.items():
            few = {"marker": "."} if len(points) < 20 else {}
            axes.plot(*zip(*points, strict=True), linewidth=1.2, label=label, **few)
        known = metric_of(name)
        axes.set_title(shows.get(name, known.label) if known.group == OTHER else known.title)
        axes.set_xlabel("steps")
        axes.locator_params(axis="x", integer=True, nbins=6)
        if len(lines) > 1 and name == next(iter(panels)):
            axes.legend(frameon=False, fontsize=7)
    return figure


@as_svg
def over_policies(columns: Mapping[str, str], policies: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A panel for each metric of the evaluations, with intervals, over the policies in order; None without metrics.

    ``columns`` are the metrics' titles by name. ``<name>.low`` and ``.high`` are the ends of an interval.
    """
    panels = {
        name: {label: metrics for label, metrics in policies.items() if name in metrics}
        for name in columns
        if any(name in metrics for metrics in policies.values())
    }
    if not panels or len(policies) < 2:
        return None
    figure = new_figure(PANEL_INCHES * len(panels) + 0.4, 2.4)
    subplots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, measured) in zip(subplots, panels.items(), strict=True):
        positions = [list(policies).index(label) for label in measured]
        values = [metrics[name] for metrics in measured.values()]
        below = [metrics[name] - metrics.get(f"{name}.low", metrics[name]) for metrics in measured.values()]
        above = [metrics.get(f"{name}.high", metrics[name]) - metrics[name] for metrics in measured.values()]
        axes.errorbar(positions, values, yerr=[below, above], marker="o", markersize=4, capsize=3, linewidth=1.2)
        axes.set_xticks(range(len(policies)), list(policies), rotation=30, ha="right")
        axes.set_title(columns[name])
    return figure


def _of(name: str, points: Points) -> list[tuple[float, float]]:
    return [(step, metrics[name]) for step, metrics in points if name in metrics]
