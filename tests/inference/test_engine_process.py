"""A process that is running before its work is known: as one that is started with it, and with the end of its parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from alignment_core.inference.engine_process import EngineContext
from tests.processes import wait_until

MAKE = "from alignment_core.inference.engine_process import EngineProcess\nengine = EngineProcess()\n"


def record(path: Path) -> None:
    """Write what a process can see of how it was started."""
    process = multiprocessing.current_process()
    names = ("ALIGN_TEST_CHANGED", "ALIGN_TEST_NEW", "ALIGN_TEST_REMOVED")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    path.write_text(json.dumps([process.name, process.daemon, os.getpid(), environment]))


def test_the_first_process_of_an_engine_is_running_already_and_is_otherwise_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGN_TEST_CHANGED", "before")
    monkeypatch.setenv("ALIGN_TEST_REMOVED", "before")
    context = EngineContext()
    (child,) = multiprocessing.active_children()
    monkeypatch.setenv("ALIGN_TEST_CHANGED", "after")
    monkeypatch.setenv("ALIGN_TEST_NEW", "after")
    monkeypatch.delenv("ALIGN_TEST_REMOVED")
    pids = []
    for name in ("EngineCore", "EngineCore_DP1"):
        path = tmp_path / name
        process = context.Process(target=record, name=name, kwargs={"path": path})
        process.start()
        process.join(60)
        assert (process.name, process.exitcode) == (name, 0)
        changed = {"ALIGN_TEST_CHANGED": "after", "ALIGN_TEST_NEW": "after"}
        assert json.loads(path.read_text()) == [name, False, process.pid, changed]
        pids.append(process.pid)
    assert pids[0] == child.pid != pids[1]


def test_a_process_that_fails_before_it_starts_an_engine_does_not_wait_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{MAKE}print(engine.pid)"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not psutil.pid_exists(int(done.stdout))


def test_a_process_that_waits_for_work_ends_with_its_parent_even_if_that_is_killed() -> None:
    code = f"import os\n{MAKE}print(engine.pid, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert done.stdout is not None
    pid = int(done.stdout.readline())
    assert done.wait(60) == -9
    assert wait_until(lambda: ended(pid), 60)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
