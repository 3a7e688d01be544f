"""Lineage as a figure: the stages behind some artifacts, from external sources at the top to the artifacts at the bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from alignment_core.artifacts import Provenance, Reference
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.sources import sources_of
from alignment_core.lineage.tree import Gap, Tree
from alignment_core.reporting.drawing import as_svg, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_NAME = 28
OUTSIDE, STAGE, WANTED = "#eef1f4", "#ffffff", "#dceefb"


@as_svg
def picture(graph: Graph, references: Iterable[Reference]) -> Figure:
    """A figure of what is upstream of ``references``: a box for each stage, with its used outputs, and for each source; the
    middle of long chains is left out.

    An arrow from a stage with several outputs names the used one.
    """
    wanted = list(dict.fromkeys(references))
    boxes, arrows = _upstream(graph, wanted)
    positions = _positions(boxes, arrows)
    columns = max((column for column, _ in positions.values()), default=0) + 1
    rows = max((row for _, row in positions.values()), default=0) + 1
    lines = max((text.count("\n") for text, _ in boxes.values()), default=1)
    figure = new_figure(max(4.0, 1.8 * columns), max(1.5, (0.5 + 0.15 * lines) * rows))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    for (start, end), outputs in arrows.items():
        style = {"arrowstyle": "-|>", "color": "#8a949e", "shrinkA": 12, "shrinkB": 12, "linewidth": 0.8}
        axes.annotate("", xy=positions[end], xytext=positions[start], arrowprops=style, zorder=1)
        (x, y), (below_x, below_y) = positions[start], positions[end]
        axes.text((x + below_x) / 2, (y + below_y) / 2, ", ".join(outputs), ha="center", fontsize=5.5, zorder=3)
    for name, (text, colour) in boxes.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "#5b6670", "linewidth": 0.8}
        axes.text(*positions[name], text, ha="center", va="center", fontsize=6.5, bbox=box, zorder=2)
    return figure


def _upstream(
    graph: Graph, wanted: list[Reference]
) -> tuple[dict[str, tuple[str, str]], dict[tuple[str, str], list[str]]]:
    """Boxes (text, colour) by name, and arrows between their names, each with the used outputs of a stage that has several. An
    artifact without a recorded stage is a box of its own."""
    boxes: dict[str, tuple[str, str]] = {}
    arrows: dict[tuple[str, str], list[str]] = {}
    used_of: dict[str, list[str]] = {}
    trees = [Tree(graph, reference, upward=True) for reference in wanted]
    visible = {reference for tree in trees for reference in tree.visible()}
    for reference in dict.fromkeys(reference for tree in trees for reference in tree.nodes if reference in visible):
        records = graph.made_by(reference)
        for record in records:
            used_of.setdefault(record.key, [_short(record.label)]).append(_output(record, reference))
            colour = WANTED if set(wanted) & set(record.outputs.values()) else STAGE
            boxes[record.key] = ("\n".join(used_of[record.key]), colour)
            for source in sources_of(record):
                boxes[source.path] = (_short(source.path), OUTSIDE)
                arrows[source.path, record.key] = []
            for used in dict.fromkeys(record.inputs.values()):
                if used not in visible:
                    continue
                for maker in graph.made_by(used):
                    names = maker.names_of(used) if len(maker.outputs) > 1 else []
                    arrows.setdefault((maker.key, record.key), []).extend(names)
                if not graph.made_by(used):
                    arrows[str(used), record.key] = []
        if not records:
            boxes[str(reference)] = (f"{reference.kind}\n{reference.digest[:12]}", OUTSIDE)
    for tree in trees:
        for reference in tree.visible():
            for gap in tree.shown(reference):
                if isinstance(gap, Gap) and gap.then is not None:
                    name = f"behind {reference}"
                    boxes[name] = (f"… {gap.count}\n{gap.what}", OUTSIDE)
                    arrows |= {(name, record.key): [] for record in graph.made_by(reference)}
                    arrows |= {(record.key, name): [] for record in graph.made_by(gap.then.reference)}
    return boxes, arrows


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


def _output(record: Provenance, output: Reference) -> str:
    """The text for an output: its name if there are several, else its kind, and its digest."""
    name = " and ".join(record.names_of(output)) if len(record.outputs) > 1 else output.kind
    return f"{_short(name)} {output.digest[:8]}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"…{text[1 - LONGEST_NAME :]}"
