"""The metrics of a stage as a table: grouped, in order, with labels, units and the values at its start."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from alignment_core.evaluation.metric_names import arrow, metric_of, single_numbers
from alignment_core.host.progress_log import number

HEAD = ("metric", "at the start", "value")


def result_rows(metrics: Mapping[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """Cells of ``HEAD`` by group. Arrows show the better direction; intervals follow the value."""
    groups = groupby(single_numbers(metrics), key=lambda name: metric_of(name).group)
    return {group: [_row(name, metrics) for name in names] for group, names in groups}


def _row(name: str, metrics: Mapping[str, Any]) -> tuple[str, str, str]:
    first = metrics.get(f"{name}.first")
    return title_with_arrow(name, metrics), "" if first is None else number(first), value_with_interval(name, metrics)


def title_with_arrow(name: str, metrics: Mapping[str, Any]) -> str:
    """Title of a metric, with an arrow in the better direction."""
    return " ".join(filter(None, (metric_of(name).title, arrow(name, metrics))))


def value_with_interval(name: str, metrics: Mapping[str, Any]) -> str:
    """Value of a metric, followed by its interval if it has one; empty for a metric that was not measured."""
    if name not in metrics:
        return ""
    low, high = metrics.get(f"{name}.low"), metrics.get(f"{name}.high")
    ends = "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    return number(metrics[name]) + ends
