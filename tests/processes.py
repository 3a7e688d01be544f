"""Finding the processes of a run from outside, whoever their parent is by now."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came to hold within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
