"""`align up` on a full disk: its services keep running, and recover once there is space again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from alignment.flows.console import say
from alignment.flows.service import services, supervisor
from alignment_core.errors import EnvironmentFault
from tests.conftest import fill
from tests.processes import wait_until


@pytest.fixture
def home(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_HOME", str(small_disk))
    services.folder().mkdir()
    return small_disk


def test_a_service_that_cannot_start_is_retried_later(home: Path) -> None:
    service = supervisor._Service("worker", [sys.executable, "-c", "import time; time.sleep(60)"])
    taken = fill(home)
    service.keep_running()
    assert (service.state.pid, service.restarts) == (None, 0)
    for path in taken:
        path.unlink()
    try:
        assert wait_until(lambda: service.keep_running() or service.state.pid is not None, 10)
        assert service.restarts == 1
    finally:
        service.close()


def test_an_unwritten_state_is_written_once_there_is_space(home: Path) -> None:
    taken = fill(home)
    running = supervisor.Services(1, {})
    running._write("starting")
    for path in taken:
        path.unlink()
    running._write("starting")
    assert services.State.model_validate_json((services.folder() / "state.json").read_text()).phase == "starting"


def test_a_long_log_is_truncated_to_free_space(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.flows.service.supervisor.LONGEST_LOG_BYTES", 1 << 18)
    log = home / "server.log"
    log.write_bytes(bytes(1 << 19))
    fill(home)
    supervisor.trim(log)
    assert log.stat().st_size == 0
    assert not (home / "server.old.log").exists()


def test_a_line_that_the_log_cannot_write_ends_no_service(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (home / "reconciler.log").open("w") as log:
        fill(home)
        monkeypatch.setattr(sys, "stdout", log)
        say("run: crashed: its process is gone")
        monkeypatch.undo()
        for path in home.glob("taken-*"):
            path.unlink()


def test_services_refuse_to_start_on_a_full_disk_at_once(home: Path) -> None:
    fill(home)
    with pytest.raises(EnvironmentFault, match=r"Prefect's server needs .* the disk is full"):
        services.start(1, None)
