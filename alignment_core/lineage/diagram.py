"""Lineage as boxes and arrows: stages, external sources, and what is left out of long chains; also as text for Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from alignment_core.artifacts import Provenance, Reference
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.sources import sources_of
from alignment_core.lineage.tree import Gap, Tree
from alignment_core.printable import printable

OUTSIDE, STAGE, WANTED = "#eef1f4", "#ffffff", "#dceefb"
"""Colours of sources and artifacts without a record, of stages, and of those that made a root of a tree."""


@dataclass(frozen=True)
class Box:
    """A stage with its used outputs, a source, an artifact without a record, or a note of what is left out."""

    lines: tuple[str, ...]
    colour: str


@dataclass(frozen=True)
class Diagram:
    """Boxes by name; and by the names of the two boxes of each arrow, the outputs that it stands for, if the stage where it
    begins has several."""

    boxes: dict[str, Box]
    arrows: dict[tuple[str, str], list[str]]


def diagram(graph: Graph, trees: Iterable[Tree], everything: bool = False) -> Diagram:
    """The stages and sources of some trees; without ``everything``, the middle of long chains is left out as in text."""
    trees = tuple(trees)
    boxes: dict[str, Box] = {}
    arrows: dict[tuple[str, str], list[str]] = {}
    outputs_of: dict[str, list[str]] = {}
    shown = {tree: set(tree.nodes if everything else tree.visible()) for tree in trees}
    visible = set[Reference]().union(*shown.values())
    wanted = {tree.root for tree in trees}
    read = {reference for tree in trees if tree.upward for reference in shown[tree]}
    for reference in dict.fromkeys(reference for tree in trees for reference in tree.nodes if reference in visible):
        for record in graph.made_by(reference):
            outputs_of.setdefault(record.key, [_line(record.label)]).append(_output(record, reference))
            colour = WANTED if wanted & set(record.outputs.values()) else STAGE
            boxes[record.key] = Box(tuple(outputs_of[record.key]), colour)
            for source in sources_of(record) if reference in read else ():
                boxes[source.path] = Box((_line(source.path),), OUTSIDE)
                arrows[source.path, record.key] = []
            for used in dict.fromkeys(record.inputs.values()):
                if used not in visible:
                    continue
                for maker in graph.made_by(used):
                    names = maker.names_of(used) if len(maker.outputs) > 1 else []
                    arrows.setdefault((maker.key, record.key), []).extend(map(_line, names))
                if not graph.made_by(used):
                    arrows[str(used), record.key] = []
        if not graph.made_by(reference):
            boxes[str(reference)] = Box((reference.kind, reference.digest[:12]), OUTSIDE)
    for tree in () if everything else trees:
        _add_gaps(graph, tree, boxes, arrows)
    return Diagram(boxes, arrows)


def _add_gaps(graph: Graph, tree: Tree, boxes: dict[str, Box], arrows: dict[tuple[str, str], list[str]]) -> None:
    """A box for each gap, between the stages before and after it."""
    for reference in tree.visible():
        for number, gap in enumerate(tree.shown(reference)):
            if not isinstance(gap, Gap):
                continue
            name = f"{'behind' if tree.upward else 'after'} {reference} {number}"
            boxes[name] = Box((f"… {gap.count}", gap.what), OUTSIDE)
            near = _names(graph, reference)
            far = _names(graph, gap.then.reference) if gap.then else []
            before, after = (far, near) if tree.upward else (near, far)
            arrows |= {(start, name): [] for start in before} | {(name, end): [] for end in after}


def _names(graph: Graph, reference: Reference) -> list[str]:
    """The boxes of an artifact: its stages, or its own."""
    return [record.key for record in graph.made_by(reference)] or [str(reference)]


def _output(record: Provenance, output: Reference) -> str:
    """The text for an output: its name if there are several, else its kind, and its digest."""
    name = " and ".join(record.names_of(output)) if len(record.outputs) > 1 else output.kind
    return f"{_line(name)} {output.digest[:8]}"


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def to_dot(drawn: Diagram) -> str:
    """A diagram in Graphviz's language, as ``dot`` reads it: https://graphviz.org/doc/info/lang.html."""
    return "\n".join(_dot_lines(drawn))


def _dot_lines(drawn: Diagram) -> Iterator[str]:
    numbers = {name: f"n{number}" for number, name in enumerate(drawn.boxes)}
    yield "digraph lineage {"
    yield '  node [shape=box, style="rounded,filled"];'
    for name, box in drawn.boxes.items():
        text = r"\n".join(map(_escaped, box.lines))
        yield f'  {numbers[name]} [label="{text}", fillcolor="{box.colour}"];'
    for (start, end), outputs in drawn.arrows.items():
        label = f' [label="{_escaped(", ".join(outputs))}"]' if outputs else ""
        yield f"  {numbers[start]} -> {numbers[end]}{label};"
    yield "}"


def _escaped(text: str) -> str:
    r"""A text inside a quoted label, where ``\"`` is a quote, other backslashes begin escapes such as ``\N``, and ``&`` begins
    an entity of HTML."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;")
