"""`align touched`: what was made from a file, a Hub name or a row, and which tags named it."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json
from alignment_core.artifacts import open_store
from alignment_core.journal import short_id

_FEW = 20


def touched(
    source: Annotated[
        str, typer.Argument(help="Part of a source's path or Hub name, or the first digits of its digest or commit.")
    ],
    row: Annotated[
        str | None, typer.Option("--row", help="A text of a row: only what was made from data sets that have it.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every artifact, not the first 20 of each kind.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tags and artifacts that a file, a Hub name or one of its rows touched."""
    from alignment_core.lineage.touched import Touched, touched

    result = touched(open_store(store, writes=False), source, row)
    if as_json:
        return print_json(result.model_dump(mode="json"))
    lines = [f"{path}  {', '.join(pin[:12] for pin in pins)}" for path, pins in result.sources.items()]
    for reference in result.without_row:
        lines.append(f"{reference.short} read it, without this row")
    for reference in result.unknown:
        lines.append(f"{reference.short} cannot be read for the row, so it counts as if it had it")

    def line(artifact: Touched) -> str:
        labels = ", ".join(artifact.made_by)
        run = f", run {short_id(artifact.run)}" if artifact.run else ""
        return f"  {artifact.reference.short}  {labels}  {artifact.made_at[:19].replace('T', ' ')}{run}"

    tags = [(tag, artifact) for artifact in result.artifacts for tag in artifact.tags]
    lines += ["", "tags" if tags else "no tag pointed to any of it"]
    for tag, artifact in tags:
        where = "points to it now" if tag.now else f"pointed to it (move {', '.join(map(str, tag.moves))})"
        lines.append(f"  {tag.tag} {where}: {artifact.reference.short}")
    by_kind = sorted(result.artifacts, key=lambda artifact: artifact.reference.kind)
    kinds = {
        kind: list(artifacts) for kind, artifacts in groupby(by_kind, key=lambda artifact: artifact.reference.kind)
    }
    for kind in dict.fromkeys(artifact.reference.kind for artifact in result.artifacts):
        shown = kinds[kind] if everything else kinds[kind][:_FEW]
        lines += ["", f"{kind}: {len(kinds[kind])}", *map(line, shown)]
        if len(shown) < len(kinds[kind]):
            lines.append(f"  … {len(kinds[kind]) - len(shown)} more (--all lists them)")
    return out.print("\n".join(lines), markup=False)
