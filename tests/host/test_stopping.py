"""A run that is stopped, or whose flow is killed, keeps its work: training writes a checkpoint before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.artifacts import open_store
from alignment_core.training.checkpoints import newest_progress
from tests.conftest import TinyModel
from tests.processes import processes_of, wait_until

pytestmark = pytest.mark.slow

CALLS = Path(__file__).with_name("training_call.py")
STEPS = 100_000
"""More than anybody waits for."""


def test_a_stage_saves_a_checkpoint_when_its_flow_ends_and_resumes_there(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    store, saved = open_store(tmp_path / "store"), 0
    for ending in (signal.SIGTERM, signal.SIGKILL):
        flow = subprocess.Popen(
            [sys.executable, str(CALLS), str(tmp_path / "store"), str(tiny_model()), str(STEPS)],
            env={**os.environ, "PYTHONPATH": str(CALLS.parents[2])},
            stdout=subprocess.PIPE,
        )
        assert flow.stdout is not None
        assert flow.stdout.readline() == b"%d\n" % saved, "it trains from where the one before was ended"
        flow.send_signal(ending)
        flow.wait(60)
        assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
        (progress,) = store.workspace.all_progress.iterdir()
        checkpoint = newest_progress(progress)
        assert checkpoint is not None
        before, saved = saved, int(checkpoint.name.removeprefix("step-"))
        assert before < saved < STEPS
