"""A program that runs the rl stage with a Ray of its own; it may be killed while the process beside it writes a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from alignment_core.artifacts import Store, open_store
from alignment_core.artifacts.paths import snapshot_path
from alignment_core.artifacts.stored_progress import files_of
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import key_of
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig
from alignment_core.rollout import trajectories
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
STEPS = "steps"
"""File with the steps that were reported."""


def run_program(
    store: str,
    call: StageCall,
    resources: ResourcesConfig,
    killed_in: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[float]:
    """The steps that the program reported; killed in this step, it reported others before. Returns once its Ray has ended."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:  # for Ray's sockets
        arguments = [store, call.model_dump_json(), resources.model_dump_json(), folder, json.dumps(killed_in)]
        program = [sys.executable, "-m", __name__, *arguments]
        code = subprocess.run(program, cwd=ROOT, env={**os.environ, **variables}, check=False, timeout=300).returncode
        assert code == (0 if killed_in is None else -signal.SIGKILL)
        assert wait_until(lambda: not _processes_with(folder), 60)
        return [float(line) for line in Path(folder, STEPS).read_text().split()]


def _processes_with(folder: str) -> list[int]:
    """Processes whose command lines have this folder."""
    lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if any(folder in part for part in line)]


def main(address: str, call: str, resources: str, temporary: str, killed_in: str) -> None:
    """Write each step that is reported into a file."""
    trajectories.SMALL = 0
    store, requested = open_store(address), StageCall.model_validate_json(call)
    given = ResourcesConfig.model_validate_json(resources)
    write = trajectories.Trajectories.write

    def killed(written: trajectories.Trajectories, step: int, *arguments: Any) -> None:
        is_last = step == json.loads(killed_in)
        partial = written.folder / f"step-{step:06d}.partial"
        if is_last:
            assert written._writer, "it was started for an earlier step"
            assert given.progress == "local" or wait_until(lambda: _has_checkpoint(store, requested), 60)
            os.mkfifo(partial)
        write(written, step, *arguments)
        if is_last:
            with partial.open("rb"):  # once the other process has opened it, too
                os.kill(os.getpid(), signal.SIGKILL)

    trajectories.Trajectories.write = killed  # type: ignore[assignment, method-assign]
    machines = WarmMachines(given, Path(temporary))
    with Path(temporary, STEPS).open("a", buffering=1) as file, closing(machines):
        run_stage(StageRequest(store, requested, machines, given, lambda done, *_: print(done, file=file)))


def _has_checkpoint(store: Store, call: StageCall) -> bool:
    """Whether the store has one of the stage's progress."""
    path = snapshot_path(key_of(call).value)
    return store.backend.stat(path) is not None and any(
        entry.path.startswith("step-") for entry in files_of(store, path)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
