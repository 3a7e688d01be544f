"""The ``align`` command with a separate home: as a process, as users run it, or in this process if equivalent."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.access import of_client
from alignment.flows.cli.main import main
from alignment.flows.service import environment
from alignment.flows.service.prefect_api import PrefectApi

Align = Callable[..., dict[str, Any]]


@contextmanager
def prefect_server(home: Path) -> Iterator[dict[str, str]]:
    """One Prefect server for many runs, and the environment that names it: without one each run starts its own."""
    before = dict(os.environ)
    os.environ["ALIGN_HOME"] = str(home)
    environment.prepare()
    api = PrefectApi()
    os.environ.clear()
    os.environ.update(before)
    try:
        api.wait()
        yield of_client(api.url, api.token)
    finally:
        api.server.close()


def run_align(home: Path, *arguments: str, expect: int = 0, timeout: float = 550, **variables: str) -> dict[str, Any]:
    """Run ``align … --json`` in a process with these additional environment variables; returns its last line as an object."""
    done = subprocess.run(
        [sys.executable, "-m", "alignment.flows.cli.main", *arguments, "--json"],
        env={**os.environ, "ALIGN_HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def align_here(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that starts no Prefect, called in this process through its entry point; returns its output and exit code."""
    printed, complained = io.StringIO(), io.StringIO()
    before, variables = signal.getsignal(signal.SIGTERM), dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(complained):
        patch.setenv("ALIGN_HOME", str(home))
        patch.setattr(sys, "argv", ["align", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
            os.environ.clear()
            os.environ.update(variables)
    return subprocess.CompletedProcess(["align", *arguments], code, printed.getvalue(), complained.getvalue())


def states(outcome: dict[str, Any]) -> dict[str, str]:
    """The state of each stage of a run, by label."""
    return {stage["label"]: stage["state"] for stage in outcome["stages"]}


def references(outcome: dict[str, Any]) -> dict[str, str]:
    """The default output of each stage, by label."""
    return {stage["label"]: stage["reference"] for stage in outcome["stages"]}
