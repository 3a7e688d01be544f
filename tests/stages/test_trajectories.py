"""The completions of a step as a file that is written beside the training, by this process or, of large steps, by another."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from socket import socket

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from alignment_core.errors import InfrastructureError
from alignment_core.processes import wait_until
from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout import trajectories
from alignment_core.rollout.rollout import Rollout, to_batch
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.rollout.trajectory_writer import TrajectoryWriter
from alignment_core.user_code.errors import Failed
from tests.rollout.rollouts import rollout

LATE = Failed("timeout", "gave no answer within 3 seconds")


def rollouts() -> list[Rollout]:
    """Two completions that are trained on, the first with an observation as its second token, and one that is not."""
    masks = [[True, False, True], [True], [True, True]]
    return [
        rollout(
            mask,
            group=number,
            used=number < 2,
            prompt_ids=[1, 2],
            logps=np.where(mask, -1.0, 0.0).astype(np.float32),
            rewards={"a": 0.5, "b": RewardValue(1.5), "c": None if number else LATE},
        )
        for number, mask in enumerate(masks)
    ]


@pytest.fixture(params=["this process", "another process"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The process that writes steps, however small."""
    if request.param == "another process":
        monkeypatch.setattr(trajectories, "SMALL", 0)
    return str(request.param)


@pytest.mark.usefixtures("writing")
def test_trajectories_have_numbers_only_for_trained_tokens(tmp_path: Path) -> None:
    rows = rollouts()
    data = to_batch(rows[:2])
    data.numbers["advantages"] = np.array([1.0, 2.0, 3.0], np.float32)
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 1)) as written:
        written.write(0, rows, data)
        written.settle()
    table = pq.read_table(tmp_path / "steps" / "step-000000.parquet")
    assert table.column("advantages").to_pylist() == [[1.0, 0.0, 2.0], [3.0], None]
    assert table.column("completion_ids").to_pylist() == [[0, 1, 2], [0], [0, 1]]
    assert table.column("mask").to_pylist() == [[True, False, True], [True], [True, True]]
    assert table.column("prompt_ids").to_pylist() == [[1, 2]] * 3
    assert table.column("rollout_logps").to_pylist() == [[-1.0, 0.0, -1.0], [-1.0], [-1.0, -1.0]]
    assert table.column("returns").null_count == 3, "there is no critic"
    assert table.column("rewards").to_pylist() == [[0.5, 1.5, None]] * 3
    assert table.column("failures").to_pylist() == [[None, None, "timeout"], None, None]
    assert table.column("used").to_pylist() == [True, True, False]


def test_both_processes_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*rollouts(), rollout([True], prompt_text="é" * 70_000, prompt_ids=np.array([1], np.int32), masked=True)]
    rows = [rows[0], rows[1], rows[3], rows[2]]
    data = to_batch(rows[:3])
    data.numbers["returns"] = np.array([1.0, 2.0, 3.0], np.float32)
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 4)) as written:
        for step, small in enumerate((1 << 20, 0, 0)):
            monkeypatch.setattr(trajectories, "SMALL", small)
            written.write(step, rows, data if step < 2 else None)
        written.settle()
    first, second, unused = sorted((tmp_path / "steps").iterdir())
    assert first.read_bytes() == second.read_bytes()
    assert pq.read_table(first).column("returns").to_pylist() == [[1.0, 0.0, 2.0], [3.0], [0.0], None]
    assert pq.read_table(unused).column("returns").null_count == 4


@pytest.mark.usefixtures("writing")
def test_a_full_disk_is_raised_on_settle(tmp_path: Path) -> None:
    rows = rollouts()
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 3)) as written:
        partial = tmp_path / "steps" / "step-000000.partial"
        partial.symlink_to("/dev/full")
        written.write(0, rows, to_batch(rows[:2]))
        with pytest.raises(OSError, match="No space left") as caught:
            written.settle()
        assert caught.value.errno == errno.ENOSPC
        partial.unlink()
        written.write(0, rows, to_batch(rows[:2]))
        written.settle()
    assert [file.name for file in (tmp_path / "steps").iterdir()] == ["step-000000.parquet"]


def test_the_death_of_the_writing_process_is_an_error_after_which_an_attempt_writes_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "SMALL", 0)
    rows = rollouts()
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 3)) as written:
        written.write(0, rows, to_batch(rows[:2]))
        written.settle()
        assert written._writer
        written._writer._process.kill()
        written.write(1, rows, to_batch(rows[:2]))
        with pytest.raises(InfrastructureError, match=r"`rl\.trajectories` ended \(exit code -9\); .* lack of memory"):
            written.settle()
    (tmp_path / "steps" / "step-000001.partial").write_bytes(b"half of it")
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 3)) as written:
        written.write(1, rows, to_batch(rows[:2]))
        written.settle()
    first, second = sorted((tmp_path / "steps").iterdir())
    assert first.read_bytes() == second.read_bytes()


def test_no_process_is_left_after_the_end() -> None:
    writer = TrajectoryWriter()
    writer.close()
    assert writer._process.returncode is not None


def test_a_fork_that_has_the_writers_descriptor_does_not_keep_it_alive() -> None:
    writer = TrajectoryWriter()
    with socket(fileno=os.dup(writer._socket.fileno())):
        writer.close()
    assert writer._process.returncode == 0


def test_an_error_that_cannot_be_sent_is_named_and_its_traceback_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(TrajectoryWriter()) as writer:
        with pytest.raises(RuntimeError, match=r"Unsendable\('why'\)"):
            writer.call(exec, "class Unsendable(Exception): ...\nraise Unsendable('why')", {})
        writer.call(max, 1, 2)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGABRT, r"exit code -6\)$"), (signal.SIGKILL, "lack of memory")]
)
def test_only_a_killed_writer_may_have_lacked_memory(number: int, reason: str) -> None:
    with closing(TrajectoryWriter()) as writer:
        writer.call(max, 1, 2)
        for ignored in (signal.SIGTERM, signal.SIGINT):
            writer._process.send_signal(ignored)
            writer.call(max, 1, 2)
        writer._process.send_signal(number)
        with pytest.raises(InfrastructureError, match=reason):
            writer.call(max, 1, 2)


def test_the_writing_process_ends_with_a_killed_run() -> None:
    code = (
        "import time\n"
        f"from {TrajectoryWriter.__module__} import TrajectoryWriter\n"
        "writer = TrajectoryWriter()\n"
        "writer.call(max, 1, 2)\n"
        "print(writer._process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        writer = psutil.Process(int(run.stdout.readline()))
        os.kill(run.pid, signal.SIGKILL)
        assert wait_until(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE, 30)
