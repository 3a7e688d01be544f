"""The commands of ``align artifacts`` that move artifacts between stores: push, pull, copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, err, out, print_json
from alignment_core.artifacts import FileEntry, open_store

AncestorsOption = Annotated[
    bool, typer.Option("--ancestors", help="Also copy all its ancestors, back to the data and the base model.")
]
REFERENCE = "Reference, first digits of a digest, or tag in the source store."
Reference = Annotated[str, typer.Argument(help=REFERENCE)]


def register(app: typer.Typer) -> None:
    """Add the commands to those of ``align artifacts``."""
    for command in (push, pull, copy):
        app.command()(command)


def push(
    reference: Reference,
    to: Annotated[str, typer.Option("--to", help="Target store.")],
    ancestors: AncestorsOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy an artifact and its provenance to another store. Files that are there already are not sent again."""
    _copy(reference, store, to, ancestors, as_json)


def pull(
    reference: Reference,
    source: Annotated[str, typer.Option("--from", help="Source store.")],
    ancestors: AncestorsOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy an artifact and its provenance from another store. Files that are here already are not fetched again."""
    _copy(reference, source, store, ancestors, as_json)


def copy(
    reference: Reference,
    source: Annotated[str, typer.Option("--from", help="Source store.")],
    to: Annotated[str, typer.Option("--to", help="Target store.")],
    ancestors: AncestorsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy an artifact and its provenance from one store to another."""
    _copy(reference, source, to, ancestors, as_json)


def _copy(reference: str, source: str | None, target: str | None, ancestors: bool, as_json: bool) -> None:
    from alignment_core.artifacts import transfer

    from_store = open_store(source, writes=False)
    to_store = open_store(target)
    plan = transfer.plan(from_store, to_store, from_store.resolve(reference), ancestors)
    with _progress_bar(plan.size, as_json) as on_file:
        copied = transfer.copy(from_store, to_store, plan, on_file)
    if as_json:
        return print_json({"from": from_store.uri, "to": to_store.uri, **copied.model_dump(mode="json")})
    more = f" and {len(copied.artifacts) - 1} more" if len(copied.artifacts) > 1 else ""
    sent = f"{copied.sent} files sent, {copied.sent_bytes / 2**20:.1f} MiB; {copied.kept} were there"
    return out.print(f"{copied.artifacts[0]}{more}: in {to_store.uri} ({sent})", markup=False)


@contextmanager
def _progress_bar(size: int, as_json: bool) -> Iterator[Callable[[FileEntry], None]]:
    """Show a progress bar on a terminal; yields the function that each transferred file is given to."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=as_json or not err.is_terminal) as bar:
        task = bar.add_task("", total=size)
        yield lambda entry: bar.advance(task, entry.size)
