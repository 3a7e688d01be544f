"""Finding the processes of a run from outside, whoever their parent is by now."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(home: Path) -> dict[int, str]:
    """Every process that inherited this ALIGN_HOME, with its command line: the whole tree, daemons included."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("ALIGN_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return found
