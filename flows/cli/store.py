"""The commands about artifacts and tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from alignment.flows.console import JsonOption, StoreOption, err, out, print_json
from alignment_core.artifacts import (
    GcReport,
    Reference,
    Store,
    Summary,
    TagMove,
    collect,
    open_store,
    prune,
)
from alignment_core.credentials import cut
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.journal import in_use

artifacts_app = typer.Typer(name="artifacts", no_args_is_help=True, help="List, show, verify and delete artifacts.")
tags_app = typer.Typer(
    name="tags", no_args_is_help=True, help="List tags, the movable names of artifacts, and their history."
)


@artifacts_app.command("ls")
def artifacts_ls(
    kind: Annotated[str | None, typer.Option("--kind", help="Only artifacts of this kind.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List artifacts, the latest last."""
    opened = open_store(store, writes=False)
    tags: dict[Reference, list[str]] = {}
    for name, tagged in opened.tags.all().items():
        tags.setdefault(tagged, []).append(name)
    rows = [
        _row(summary, tags.get(summary.reference, []))
        for summary in opened.summaries()
        if kind in (None, summary.reference.kind)
    ]
    rows.sort(key=lambda row: row["made_at"])
    if as_json:
        return print_json({"artifacts": rows})
    return out.print("\n".join(_lines(rows)) or "no artifacts yet", markup=False)


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each artifact. References and labels are never cut, because other commands take them."""
    shown = [
        (
            Reference.parse(row["reference"]).short,
            row["made_by"].split(", "),
            row["made_at"][5:16].replace("T", " "),
            "pruned" if row["pruned"] else _size(row["bytes"]),
            row["tags"],
        )
        for row in rows
    ]
    first = max((len(reference) for reference, *_ in shown), default=0)
    second = max((len(label) for _, labels, *_ in shown for label in labels), default=0)
    for reference, (label, *others), when, size, tags in shown:
        yield f"{reference:<{first}} {label:<{second}} {when:<11} {size:>6}"
        yield from (f"{'':<{first}} {other}" for other in others)
        yield from (f"    tag {name}" for name in tags)


def _size(count: float) -> str:
    """A size in the style of ``ls -h``, such as ``2.1M``."""
    for unit in ("", "K", "M", "G"):
        if count < 1024:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}T"


def _row(summary: Summary, tags: list[str]) -> dict[str, Any]:
    return {
        "reference": str(summary.reference),
        "kind": summary.reference.kind,
        "files": summary.files,
        "bytes": summary.size,
        "made_by": ", ".join(summary.made_by),
        "made_at": summary.made_at,
        "tags": tags,
        "pruned": summary.pruned,
    }


@artifacts_app.command("show")
def artifacts_show(reference: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show an artifact's files and provenance. REFERENCE may be a digest's first digits or a tag."""
    opened = open_store(store, writes=False)
    manifest = opened.manifest(opened.resolve(reference))
    records = opened.records.makers(manifest.reference)
    summary = Summary.of(manifest, records, opened.is_pruned(manifest.reference))
    content = {
        **_row(summary, [name for name, tagged in opened.tags.all().items() if tagged == manifest.reference]),
        "path": _path(opened, manifest.reference),
        "files": [entry.model_dump() for entry in manifest.files],
        "provenance": [cut(record.model_dump(mode="json")) for record in records],
    }
    if as_json:
        return print_json(content)
    import yaml

    return out.print(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), markup=False)


def _path(store: Store, reference: Reference) -> str | None:
    """The folder of the files on this machine; None if they are pruned, or if the disk is full."""
    if store.is_pruned(reference):
        return None
    try:
        return str(store.fetch(reference))
    except EnvironmentFault as error:
        err.print(f"[yellow]warning:[/] {error}")
        return None


@artifacts_app.command("gc")
def artifacts_gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Default: only list.")] = False,
    older_than: Annotated[float, typer.Option(min=0, help="Keep objects newer than this many seconds.")] = 3600.0,
    progress_days: Annotated[
        float | None,
        typer.Option(min=0, help="Also delete checkpoints of unfinished stages that were unused for this many days."),
    ] = None,
    rollouts_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Also delete the bytes of rollouts, scores and trajectories that were unused for this many days.",
        ),
    ] = None,
    masters_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Also delete fp32 master weights that were unused for this many days, except those of tagged policies.",
        ),
    ] = None,
    cache_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Also delete this machine's copies of artifacts that were unused for this many days; the store keeps them.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find, and with --delete remove, objects that no tag and no stage record needs."""
    opened = open_store(store, writes=False)
    pruned = prune(opened, progress_days, rollouts_days, delete, in_use(), cache_days, masters_days)
    report = collect(opened, delete, older_than)
    pruned_paths = {garbage.path for garbage in pruned}
    report = GcReport(
        deleted=delete,
        garbage=(*pruned, *(garbage for garbage in report.garbage if garbage.path not in pruned_paths)),
        kept=report.kept,
    )
    if as_json:
        listed = [{"what": garbage.what, "path": garbage.path, "size": garbage.size} for garbage in report.garbage]
        return print_json({"deleted": delete, "garbage": listed})
    return out.print(str(report))


@tags_app.command("ls")
def tags_ls(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List tags and the artifacts that they point to."""
    tags = {name: str(reference) for name, reference in sorted(open_store(store, writes=False).tags.all().items())}
    if as_json:
        return print_json({"tags": tags})
    return out.print("\n".join(f"{name}  {reference}" for name, reference in tags.items()) or "no tags yet")


def _move_line(move: TagMove) -> str:
    by = f"  by {move.by}" if move.by else ""
    decision = f"  {move.decision.short}" if move.decision else ""
    return f"{move.number}  {move.at}  {move.to}  {move.reason}{by}{decision}"


@tags_app.command("history")
def tags_history(name: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List every move of a tag, the first one first."""
    moves = open_store(store, writes=False).tags.history(name)
    if as_json:
        return print_json({"tag": name, "history": [move.model_dump(mode="json") for move in moves]})
    return out.print(
        "\n".join(map(_move_line, moves)) or "no moves yet",
        markup=False,
    )


TagOption = Annotated[str, typer.Option("--tag", help="The tag to move.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, recorded in the tag's history.")]


def promote(
    reference: str,
    tag: TagOption = "policy/production",
    if_current: Annotated[
        str | None,
        typer.Option("--if-current", help="Artifact that the tag must point to now, or `none` for a new tag."),
    ] = None,
    reason: ReasonOption = "promoted by hand",
    attest: Annotated[
        bool, typer.Option("--attest", help="First write provenance and bill of materials beside the artifact.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a tag to an artifact, if it still points to the one that --if-current names."""
    from alignment_core.artifacts.promotion import promote
    from alignment_core.attestation.attest import attest as write_attestations

    opened = open_store(store)
    current = opened.tags.get(tag)
    if if_current is None and current is not None:
        raise UserError(f"--if-current is missing: the tag {tag} points to {current} now; pass that to replace it")
    expected = None if if_current in (None, "none") else opened.resolve(str(if_current))
    chosen = opened.resolve(reference)
    if attest:
        write_attestations(opened, chosen)
    move = promote(opened, tag, chosen, expected, reason)
    _print_move(move, "unchanged" if move.to == current else "promoted", as_json)


def rollback(
    tag: str,
    number: Annotated[
        int | None, typer.Option("--to", help="Number of the move to roll back to; see `align tags history`.")
    ] = None,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a tag back to its previous artifact; repeat to go further back."""
    from alignment_core.artifacts.promotion import rollback

    _print_move(rollback(open_store(store), tag, number, reason), "rolled back", as_json)


def _print_move(move: TagMove, state: str, as_json: bool) -> None:
    if as_json:
        return print_json({"state": state, **move.model_dump(mode="json")})
    previous = f" (before: {move.previous.short})" if move.previous and state != "unchanged" else ""
    return out.print(f"{move.name}: {state}, points to {move.to}{previous}", markup=False)
