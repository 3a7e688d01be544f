"""A flow that has used its host and is idle now: when it ends, all processes that it started end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes import processes_of, role_of, wait_until

FLOW = """
import sys, time
from pathlib import Path
from alignment_core.host.client import Host
from alignment_core.recipes import ModelConfig, ResourcesConfig
from alignment_core.execution.base import StageCall
from alignment_core.stages.base_model import pin_model
config = pin_model(ModelConfig(name=sys.argv[2])).model_dump(mode="json")
host = Host(sys.argv[1], ResourcesConfig(trainers=1), Path(sys.argv[1] + ".log"))
host.run(StageCall(stage="base_model", label="model", config=config, inputs={}))
print("ready", flush=True)
time.sleep(600)
"""


def start_idle_flow(folder: Path, model: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A flow below ``folder`` whose trainer waits for work, and the ``ALIGN_HOME`` of its processes."""
    home = folder / "home"
    folder.mkdir(exist_ok=True)
    flow = subprocess.Popen(
        [sys.executable, "-c", FLOW, str(folder / "store"), str(model)],
        env={**os.environ, "ALIGN_HOME": str(home), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=(folder / "flow.err").open("wb"),
    )
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"ready\n", (folder / "flow.err").read_text()
    assert wait_until(lambda: "actor" in map(role_of, processes_of(home).values()), 120)
    return flow, home


def check_that_nothing_outlives(ending: signal.Signals, folder: Path, model: Path) -> None:
    """End it with this signal. Its processes run below ``folder``, with a token that no other user can read."""
    flow, home = start_idle_flow(folder, model)
    there = processes_of(home)
    assert len(there) > 5, "supervisor, host, Ray's daemons and a trainer should be there"
    raylet = next(psutil.Process(pid) for pid, line in there.items() if "raylet" in line.split()[0])
    token = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert not (folder / ".ray").exists(), "where Ray keeps a token that all can read"
    flow.send_signal(ending)
    flow.wait(60)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
    assert not token.exists()
