"""A run that is stopped, or whose flow is killed, keeps its work: training writes a checkpoint before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.artifacts import open_store
from alignment_core.execution.base import StageCall
from alignment_core.host.client import Host
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.checkpoints import newest_progress
from tests.processes import processes_of, wait_until

pytestmark = pytest.mark.slow

CALLS = Path(__file__).with_name("training_call.py")
STEPS = 200


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_stage_whose_flow_ends_writes_a_checkpoint_and_goes_on_from_it(
    tmp_path: Path, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    flow = subprocess.Popen(
        [sys.executable, str(CALLS), str(tmp_path / "store"), str(STEPS)],
        env={**os.environ, "PYTHONPATH": str(CALLS.parents[2])},
        stdout=subprocess.PIPE,
    )
    assert flow.stdout is not None
    call = StageCall.model_validate_json(flow.stdout.readline())
    assert flow.stdout.readline() == b"training\n"
    flow.send_signal(ending)
    flow.wait(60)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)

    store = open_store(tmp_path / "store")
    (progress,) = store.workspace.all_progress.iterdir()
    checkpoint = newest_progress(progress)
    assert checkpoint is not None
    saved = int(checkpoint.name.removeprefix("step-"))
    assert 0 < saved < STEPS
    with Host(store.uri, ResourcesConfig(trainers=1, zero_stage=0), tmp_path / "host.log") as host:
        result = host.run(call)
    assert result.cost["train_steps"] == STEPS - saved
    assert result.metrics["steps"] == STEPS
