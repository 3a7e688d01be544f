"""Curves over steps as SVG, drawn on the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT, MARGIN = 320, 120, 6
MOST_POINTS = 400
"""Of more points, the extremes of each part are drawn."""


@dataclass(frozen=True)
class Curve:
    """A metric over steps, with the points of its line in a box of ``WIDTH`` by ``HEIGHT``."""

    title: str
    lines: tuple[Markup, ...]
    """SVG points; a value that is not finite ends one line."""
    first: float
    last: float
    low: float
    high: float
    steps: tuple[float, float]


def curve(title: str, points: Sequence[tuple[float, float]]) -> Curve | None:
    """The curve of (step, value); None for fewer than two finite values."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return None
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    start, end = finite[0][0], finite[-1][0]

    def place(step: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - start) / ((end - start) or 1)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    lines: list[list[str]] = [[]]
    for step, value in _thinned(points):
        if math.isfinite(value):
            lines[-1].append(place(step, value))
        elif lines[-1]:
            lines.append([])
    drawn = tuple(Markup(" ".join(line)) for line in lines if line)  # numbers alone, of whatever length
    return Curve(title, drawn, finite[0][1], finite[-1][1], low, high, (start, end))


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS``: of each of as many parts, its lowest and its highest point, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    kept = []
    parts = MOST_POINTS // 2
    for number in range(parts):
        part = points[number * len(points) // parts : (number + 1) * len(points) // parts]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept
