"""The commands of ``align`` about the store: artifacts, tags, and where each came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from alignment_core.artifacts import Manifest, Reference, Store, open_store
from flows.console import JsonOption, StoreOption, out, print_json

artifacts_app = typer.Typer(no_args_is_help=True, help="Look at what the store holds.")
tags_app = typer.Typer(no_args_is_help=True, help="Look at the movable names of artifacts.")


@artifacts_app.command("ls")
def artifacts_ls(
    kind: Annotated[str | None, typer.Option("--kind", help="Only artifacts of this kind.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List artifacts, the latest last."""
    opened = open_store(store)
    rows = sorted((_summary(opened, manifest) for manifest in opened.artifacts()), key=lambda row: row["made_at"])
    rows = [row for row in rows if kind in (None, row["kind"])]
    if as_json:
        return print_json({"artifacts": rows})
    table = Table(box=None)
    table.add_column("reference", no_wrap=True)  # whole, also in a pipe: it is what the other commands take
    for name in ("made by", "made at", "files", "bytes", "tags"):
        table.add_column(name)
    for row in rows:
        short = Reference.parse(row["reference"]).short
        when = row["made_at"][:19].replace("T", " ")
        table.add_row(short, row["made_by"], when, str(row["files"]), f"{row['bytes']:,}", ", ".join(row["tags"]))
    return out.print(table)


def _summary(store: Store, manifest: Manifest) -> dict[str, Any]:
    records = store.provenance(manifest.reference)
    return {
        "reference": str(manifest.reference),
        "kind": manifest.kind,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "made_by": ", ".join(record.label for record in records),
        "made_at": max((record.finished_at for record in records), default=""),
        "tags": [name for name, reference in store.tags().items() if reference == manifest.reference],
    }


@artifacts_app.command("show")
def artifacts_show(reference: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show an artifact's files and provenance. REFERENCE may be a digest's first digits or a tag."""
    opened = open_store(store)
    manifest = opened.manifest(opened.resolve(reference))
    content = {
        **_summary(opened, manifest),
        "path": str(opened.fetch(manifest.reference)),
        "files": [entry.model_dump() for entry in manifest.files],
        "provenance": [record.model_dump(mode="json") for record in opened.provenance(manifest.reference)],
    }
    if as_json:
        return print_json(content)
    import yaml

    return out.print(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), markup=False)


@artifacts_app.command("verify")
def artifacts_verify(
    reference: Annotated[str | None, typer.Argument(help="One artifact; default all.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte again and compare digests."""
    opened = open_store(store)
    chosen = [opened.resolve(reference)] if reference else [manifest.reference for manifest in opened.artifacts()]
    problems = {str(one): found for one in chosen if (found := opened.verify(one))}
    if as_json:
        print_json({"verified": len(chosen), "problems": problems})
    else:
        for one, found in problems.items():
            out.print(f"{one}\n  " + "\n  ".join(found), markup=False)
        out.print(f"{len(chosen)} verified, {len(problems)} damaged")
    if problems:
        raise typer.Exit(1)


@artifacts_app.command("gc")
def artifacts_gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it only say what would go.")] = False,
    older_than: Annotated[float, typer.Option(help="Spare what is younger than this many seconds.")] = 3600.0,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what no tag and no stage record needs: leftovers of crashed publishers and of finished stages."""
    report = open_store(store).gc(delete=delete, older_than=older_than)
    if as_json:
        garbage = [{"what": one.what, "path": one.path, "size": one.size} for one in report.garbage]
        return print_json({"deleted": delete, "garbage": garbage})
    return out.print(str(report))


@tags_app.command("ls")
def tags_ls(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List tags and what they name."""
    tags = {name: str(reference) for name, reference in sorted(open_store(store).tags().items())}
    if as_json:
        return print_json({"tags": tags})
    return out.print("\n".join(f"{name}  {reference}" for name, reference in tags.items()) or "no tags yet")


@tags_app.command("history")
def tags_history(name: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List every move of a tag, the first one first."""
    moves = open_store(store).tag_history(name)
    if as_json:
        return print_json({"tag": name, "history": [move.model_dump(mode="json") for move in moves]})
    return out.print(
        "\n".join(f"{move.number}  {move.at}  {move.to}  {move.reason}" for move in moves) or "no moves yet",
        markup=False,
    )


def lineage(
    reference: str,
    up: Annotated[bool, typer.Option("--up", help="What it was made from (the default).")] = False,
    down: Annotated[bool, typer.Option("--down", help="What was made from it.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where an artifact comes from, or what came of it, as a tree."""
    from alignment_core.lineage import Graph, text_tree, to_json

    opened = open_store(store)
    graph, start = Graph.of(opened), opened.resolve(reference)
    trees = {}
    if up or not down:
        trees["up"] = graph.up(start)
    if down:
        trees["down"] = graph.down(start)
    if as_json:
        return print_json({name: to_json(tree) for name, tree in trees.items()})
    return out.print("\n\n".join(text_tree(tree) for tree in trees.values()), markup=False)
