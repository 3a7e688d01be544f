"""The ``align`` command as a user runs it: in a process of its own, with a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Align = Callable[..., dict[str, Any]]


def run_align(home: Path, *arguments: str, expect: int = 0, timeout: float = 550) -> dict[str, Any]:
    """Run ``align … --json``; its last line as an object."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", *arguments, "--json"],
        env={**os.environ, "ALIGN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
