"""Running ``align`` as a user does: in a process of its own, with a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def align(migrated: Path) -> Align:
    """``run_align``, where a home that is new starts with a database that has its tables."""

    def run(home: Path, *arguments: str, **options: Any) -> dict[str, Any]:
        if not home.exists() or not any(home.iterdir()):
            (home / "prefect").mkdir(parents=True)
            shutil.copyfile(migrated, home / "prefect" / "prefect.db")
        return run_align(home, *arguments, **options)

    return run
