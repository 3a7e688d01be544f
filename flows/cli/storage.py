"""The commands ``align store``: choose the store of this machine, and test its server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, err, out, print_json
from alignment_core.artifacts import open_store
from alignment_core.artifacts.group_access import open_to_group
from alignment_core.artifacts.open import choose_store, chosen_store, default_store, folder_of
from alignment_core.errors import UserError

store_app = typer.Typer(
    name="store", no_args_is_help=True, help="Choose the artifact store of this machine, and test it."
)


@store_app.command("use")
def use(
    store: Annotated[str | None, typer.Argument(help="A folder, s3://bucket/prefix or hf://organisation/name.")] = None,
    default: Annotated[bool, typer.Option("--default", help="Go back to $ALIGN_HOME/store.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Set the default store, for commands without --store, recipe or $ALIGN_STORE. Without STORE, show it."""
    if store and default:
        raise UserError("name a store, or give --default, not both")
    if store:
        opened = open_store(store)  # raises for a store that cannot be used
        choose_store(opened.uri)
    elif default:
        choose_store(None)
    uri = str(default_store())
    origin = "ALIGN_STORE" if os.environ.get("ALIGN_STORE") else "align store use" if chosen_store() else "default"
    if store and origin == "ALIGN_STORE":
        err.print(f"[yellow]warning:[/] ALIGN_STORE is set in this shell and comes first: {uri}")
    if as_json:
        return print_json({"store": uri, "chosen_by": origin})
    return out.print(f"{uri} ({origin})", markup=False)


@store_app.command("doctor")
def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Test the guarantees that a store relies on, and measure latency and throughput. Exit code 3 if one fails.

    In a folder shared with a group, this user's files are opened to the group, and files that other users must open are
    listed."""
    from alignment_core.doctor.storage import examine_storage

    _check_group_access(folder_of(store), as_json)
    report = examine_storage(open_store(store))
    if as_json:
        print_json({**report.model_dump(), "status": "ok" if report.sound else "failed"})
    else:
        out.print(report.store, markup=False)
        for promise in report.promises:
            out.print(
                f"  [{'green' if promise.kept else 'red'}]{'ok' if promise.kept else 'failed':<7}[/] {promise.name}"
            )
        latency = " · ".join(f"{kind} {value:g}" for kind, value in report.latency_ms.items())
        speed = " · ".join(f"{kind} {value:g}" for kind, value in report.mib_per_second.items())
        out.print(f"  milliseconds: {latency}\n  MiB per second: {speed}")
        out.print(f"  clock: {report.clock_seconds:+g} s beside this machine")
        if report.second_copy:
            out.print(
                f"  space: each artifact in use is stored twice: {report.second_copy}; "
                "`align artifacts gc --delete --cache-days 0` frees unused copies"
            )
    if not report.sound:
        raise typer.Exit(3)


def _check_group_access(folder: Path | None, as_json: bool) -> None:
    """Exit with code 3 if other users have closed parts of a shared folder to its group."""
    closed = open_to_group(folder, files=True) if folder is not None else []
    if not closed:
        return
    if as_json:
        print_json({"store": str(folder), "status": "failed", "closed": [entry._asdict() for entry in closed]})
    else:
        out.print(f"{folder}\n  [red]failed [/] the group cannot use:", highlight=False)
        for entry in closed:
            out.print(f"  {entry.path}: its owner, {entry.owner}, has to run `{entry.command}`", markup=False)
    raise typer.Exit(3)
