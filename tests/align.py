"""The ``align`` command with a home of its own: as a user runs it, or called in this process where that shows the same."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main

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


def align_here(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that starts no Prefect, called in this process as its entry point is: what it prints and exits with."""
    said, complained = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setenv("ALIGN_HOME", str(home))
        patch.setattr(sys, "argv", ["align", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(["align", *arguments], code, said.getvalue(), complained.getvalue())
