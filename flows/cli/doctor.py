"""The command ``align doctor``: whether this machine can run, before a run finds out."""

from __future__ import annotations

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check versions, devices, memory, disks, ports, the store and credentials (never shown); exit 3 if one failed."""
    from alignment_core.doctor import examine

    findings = examine(store)
    failed = any(one.state == "failed" for one in findings)
    if as_json:
        checks = [one.model_dump() for one in findings]
        print_json({"status": "failed" if failed else "ok", "checks": checks})
    else:
        for one in findings:
            out.print(f"{one.name:<20}[{COLOURS[one.state]}]{one.state:<9}[/]", end="")
            out.print(one.sentence, markup=False)
    if failed:
        raise typer.Exit(3)
