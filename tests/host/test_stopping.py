"""A run that is stopped, or whose flow is killed, keeps its work: training writes a checkpoint before it ends."""

from __future__ import annotations

import json
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


SLOW_SAVES = """
import time
from alignment_core.training import checkpoints
newest_progress = checkpoints.newest_progress
def slow(*arguments):
    time.sleep(4.0)
    return newest_progress(*arguments)
checkpoints.newest_progress = slow
"""
"""The call comes before the ranks write, so that a save fails if the actors end during these seconds."""


@pytest.mark.exhaustive
def test_a_stop_waits_for_a_save_that_takes_longer_than_stop_seconds(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first save the host and its supervisor know that one takes more than 4 seconds, and the recipe gives 1."""
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    (tmp_path / "sitecustomize.py").write_text(SLOW_SAVES)
    store = open_store(tmp_path / "store")
    given = json.dumps({"stop_seconds": 1, "progress_seconds": 2})
    flow = subprocess.Popen(
        [sys.executable, str(CALLS), str(tmp_path / "store"), str(tiny_model()), str(STEPS), given],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{CALLS.parents[2]}"},
    )
    steps = tmp_path / "store.step"
    assert wait_until(lambda: any(store.workspace.all_progress.glob("*/save-seconds.json")), 120)
    (progress,) = store.workspace.all_progress.iterdir()
    saved = newest_progress(progress)
    assert saved is not None
    assert wait_until(lambda: int(steps.read_text() or 0) > int(saved.name.removeprefix("step-")), 60)
    flow.send_signal(signal.SIGTERM)
    flow.wait(60)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
    newest = newest_progress(progress)
    assert newest is not None
    assert newest.name > saved.name
