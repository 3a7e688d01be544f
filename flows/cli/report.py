"""The command ``align report``: one folder about a run, to attach to a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alignment.flows import access
from alignment.flows.console import JsonOption, RunArgument, StoreOption, out, print_json
from alignment.flows.service import services
from alignment_core import journal


def report(
    run: RunArgument = journal.LAST,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. Default: ./align-report-RUN.")
    ] = None,
    samples: Annotated[bool, typer.Option(help="Keep the rows and answers that report and logs quote.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a folder for a bug report: a run's recipe, journal, logs, metrics, plots, versions, and `align doctor`.

    Secrets, home folders, the names of user and machine, and the texts of rows are removed.
    """
    from alignment_core.reporting.bundle import write_bundle

    record = journal.find(run)
    folder = output or Path(f"align-report-{journal.short_id(record.run_id)}")
    token = access.read(services.token_file())
    bundle = write_bundle(record, folder, samples, (token,) if token else (), store)
    if as_json:
        return print_json(
            {"folder": str(folder.absolute()), "files": bundle.files, "missing": bundle.missing, "cut": bundle.cut}
        )
    for name, size in bundle.files.items():
        out.print(f"{size:>10,}  {name}", markup=False)
    for name, reason in bundle.missing.items():
        out.print(f"   missing  {name}: {reason}", markup=False)
    cut = ", ".join(f"{count} {kind}" for kind, count in bundle.cut.items())
    return out.print(f"wrote {folder}{f'; removed: {cut}' if cut else ''}. Read it before you share it.", markup=False)
