"""The command ``align doctor``: check this machine before a run."""

from __future__ import annotations

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check this machine: versions, devices, memory, disks, ports, store, credentials. Exit code 3 on a failure."""
    from alignment_core.doctor import as_object, examine

    findings = examine(store)
    result = as_object(findings)
    if as_json:
        print_json(result)
    else:
        for finding in findings:
            out.print(f"{finding.name:<20}[{COLOURS[finding.state]}]{finding.state:<9}[/]", end="")
            out.print(finding.sentence, markup=False)
    if result["status"] == "failed":
        raise typer.Exit(3)
