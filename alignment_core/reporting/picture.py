"""Lineage as a figure: stages below what they used, from external sources at the top to the latest artifacts at the bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from alignment_core.artifacts import Reference
from alignment_core.lineage.diagram import Diagram, diagram
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.tree import Tree
from alignment_core.reporting.drawing import as_svg, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_LINE = 28


def picture(graph: Graph, references: Iterable[Reference]) -> str | None:
    """SVG of what is upstream of ``references``; the middle of long chains is left out."""
    return draw(diagram(graph, [Tree(graph, reference, upward=True) for reference in dict.fromkeys(references)]))


@as_svg
def draw(drawn: Diagram) -> Figure:
    """A figure of a diagram. An arrow from a stage with several outputs names the used one."""
    positions = _positions(drawn.boxes, drawn.arrows)
    texts = {name: "\n".join(map(_short, box.lines)) for name, box in drawn.boxes.items()}
    columns = max((column for column, _ in positions.values()), default=0) + 1
    rows = max((row for _, row in positions.values()), default=0) + 1
    lines = max((text.count("\n") for text in texts.values()), default=1)
    figure = new_figure(max(4.0, 1.8 * columns), max(1.5, (0.5 + 0.15 * lines) * rows))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    for (start, end), outputs in drawn.arrows.items():
        style = {"arrowstyle": "-|>", "color": "#8a949e", "shrinkA": 12, "shrinkB": 12, "linewidth": 0.8}
        axes.annotate("", xy=positions[end], xytext=positions[start], arrowprops=style, zorder=1)
        (x, y), (below_x, below_y) = positions[start], positions[end]
        axes.text((x + below_x) / 2, (y + below_y) / 2, ", ".join(outputs), ha="center", fontsize=5.5, zorder=3)
    for name, box in drawn.boxes.items():
        frame = {"boxstyle": "round,pad=0.35", "facecolor": box.colour, "edgecolor": "#5b6670", "linewidth": 0.8}
        axes.text(*positions[name], texts[name], ha="center", va="center", fontsize=6.5, bbox=frame, zorder=2)
    return figure


def _positions(boxes: Mapping[str, object], arrows: Iterable[tuple[str, str]]) -> dict[str, tuple[float, float]]:
    """(column, row) of each box: below all boxes with an arrow to it, and near their mean column."""
    before: dict[str, list[str]] = {name: [] for name in boxes}
    for start, end in arrows:
        before[end].append(start)
    row: dict[str, int] = {}
    while len(row) < len(boxes):
        left = [name for name in boxes if name not in row]
        ready = [name for name in left if all(start in row for start in before[name])]
        for name in ready or left:  # a stage that returned an input unchanged makes a cycle
            row[name] = 1 + max((row[start] for start in before[name] if start in row), default=-1)
    levels = [[name for name in boxes if row[name] == number] for number in range(max(row.values(), default=-1) + 1)]
    widest = max(map(len, levels), default=0)
    positions: dict[str, tuple[float, float]] = {}
    for number, level in enumerate(levels):
        columns = {name: [positions[start][0] for start in before[name] if start in positions] for name in level}
        level.sort(key=lambda name: sum(columns[name]) / max(1, len(before[name])))
        positions |= {name: (column + (widest - len(level)) / 2, float(number)) for column, name in enumerate(level)}
    return positions


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_LINE else f"…{text[1 - LONGEST_LINE :]}"
