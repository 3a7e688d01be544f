"""The command ``align doctor``: whether this machine can run, before a run finds out."""

from __future__ import annotations

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check versions, devices, memory, disks, ports, the store and credentials (never shown); exit 3 if one failed."""
    from alignment_core.doctor import as_object, examine

    findings = examine(store)
    told = as_object(findings)
    if as_json:
        print_json(told)
    else:
        for one in findings:
            out.print(f"{one.name:<20}[{COLOURS[one.state]}]{one.state:<9}[/]", end="")
            out.print(one.sentence, markup=False)
    if told["status"] == "failed":
        raise typer.Exit(3)
