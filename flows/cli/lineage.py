"""The commands about lineage: what an artifact was made from, also in formats of other programs; how two artifacts differ."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json, print_line
from alignment_core.artifacts import open_store
from alignment_core.errors import UserError


class LineageFormat(StrEnum):
    """Formats of `align lineage`."""

    tree = "tree"
    dot = "dot"
    svg = "svg"
    json = "json"
    openlineage = "openlineage"


def lineage(
    reference: str,
    up: Annotated[bool, typer.Option("--up", help="Show its inputs (the default).")] = False,
    down: Annotated[bool, typer.Option("--down", help="Show the artifacts made from it.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all of a long chain of rounds or nights, not only its ends.")
    ] = False,
    form: Annotated[
        LineageFormat | None,
        typer.Option(
            "--format",
            help="tree (the default), dot (Graphviz), svg, json, or openlineage: an event of each stage, one JSON object per "
            "line. json and openlineage are always whole.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the inputs of an artifact, or the artifacts made from it, as a tree or in a format of other programs."""
    from alignment_core.lineage import Graph, Tree, text_tree, to_json
    from alignment_core.lineage.diagram import diagram, to_dot

    if as_json and form not in (None, LineageFormat.json):
        raise UserError(f"--json and --format {form} are two formats: leave one of them out")
    if form is LineageFormat.openlineage:
        from alignment_core.tracking.trackers import OPENLINEAGE, require_package

        require_package("--format openlineage", OPENLINEAGE, "use --format json")
    opened = open_store(store, writes=False)
    start, trees = opened.resolve(reference), {}
    with Graph.of(opened) as graph:
        if up or not down:
            trees["up"] = Tree(graph, start, upward=True)
        if down:
            trees["down"] = Tree(graph, start, upward=False)
        drawn = diagram(graph, trees.values(), everything) if form in (LineageFormat.dot, LineageFormat.svg) else None
    if as_json or form is LineageFormat.json:
        return print_json({name: to_json(tree) for name, tree in trees.items()})
    if form is LineageFormat.openlineage:
        from alignment_core.lineage.events import events_of

        for line in events_of(opened, trees.values()):
            print_line(line)
        return None
    if drawn is not None:
        from alignment_core.reporting.picture import draw

        return print_line(to_dot(drawn) if form is LineageFormat.dot else str(draw(drawn)))
    return out.print("\n\n".join(text_tree(tree, out.width, everything) for tree in trees.values()), markup=False)


def diff(a: str, b: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Compare two artifacts: keys, inputs, metrics, cost, packages and files."""
    from alignment_core.lineage import compare, diff_text

    opened = open_store(store, writes=False)
    difference = compare(opened, opened.resolve(a), opened.resolve(b))
    return print_json(difference.model_dump(mode="json")) if as_json else out.print(diff_text(difference), markup=False)
