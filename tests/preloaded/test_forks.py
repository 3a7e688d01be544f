"""Forks of preloaded processes live as long as the launcher that Ray knows; servers without forks give way to others."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import TinyModel
from tests.host.idle_flow import start_idle_flow
from tests.matrix import matrix
from tests.preloaded import spawn
from tests.processes import processes_of, role_of, wait_until

ATTEMPTS = 4
"""An actor imports for itself while the server of its environment is importing: later ones are forked."""


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of this test alone: all others may have forks for tests that ran before, and no further one would start."""
    if preloaded.JOB_CONFIG in os.environ:
        monkeypatch.setenv(preloaded.JOB_CONFIG, os.environ[preloaded.JOB_CONFIG])  # restored at the end
    owner = subprocess.Popen(["sleep", "600"])
    preloaded.preload(owner.pid)
    yield
    owner.kill()
    owner.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
@pytest.mark.skipif(
    os.environ.get("ALIGN_TESTS_PRELOADED") == "0", reason="ALIGN_TESTS_PRELOADED=0: actors import for themselves"
)
@pytest.mark.parametrize("killed", matrix(["fork", "launcher"], usual=["launcher"]))
def test_the_fork_and_its_launcher_end_together(killed: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    flow, home, pids = start_forked(tmp_path, tiny_model())
    try:
        of_fork, of_launcher = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids.values()]
        assert {line for line in of_launcher if line} <= set(of_fork)

        os.kill(pids[killed], signal.SIGKILL)
        assert wait_until(lambda: not processes_of(home).keys() & pids.values(), 60), processes_of(home)
    finally:
        end(flow, home)


def start_forked(folder: Path, model: Path) -> tuple[subprocess.Popen[bytes], Path, dict[str, int]]:
    """A flow whose trainer was forked, its home, and the pids of the fork and of its launcher."""
    for attempt in range(ATTEMPTS):
        flow, home = start_idle_flow(folder / str(attempt), model)
        lines = processes_of(home)
        (actor,) = [pid for pid, line in lines.items() if role_of(line) == "actor"]
        for pid, line in lines.items():
            if "preloaded/launch.py" in line:
                return flow, home, {"fork": actor, "launcher": pid}
        end(flow, home)
    raise AssertionError(f"no trainer of {ATTEMPTS} flows was forked")


def end(flow: subprocess.Popen[bytes], home: Path) -> None:
    flow.send_signal(signal.SIGINT)
    flow.wait(60)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)


def test_one_more_server_ends_that_which_was_asked_longest_ago_and_has_no_fork(tmp_path: Path) -> None:
    """Servers with forks have children, and launchers touch the socket of the server that they ask."""
    started = {}
    for number in range(spawn.SERVERS):
        command = ["sh", "-c", "sleep 600 & wait"] if number == 0 else ["sleep", "600"]
        path = tmp_path / str(number)
        path.touch()
        os.utime(path, (number, number))
        started[str(path)] = subprocess.Popen(command)
    servers = list(started.values())
    try:
        assert wait_until(lambda: spawn.has_forks(servers[0].pid), 60)
        os.utime(tmp_path / "1")
        assert spawn.has_room(started)
        assert [server.poll() for server in servers] == [None, None, -signal.SIGKILL, *[None] * (spawn.SERVERS - 3)]
        assert str(tmp_path / "2") not in started
        assert not (tmp_path / "2").exists()
        assert spawn.has_room(started), "one place is free now"
        assert sum(server.poll() is None for server in servers) == spawn.SERVERS - 1
    finally:
        for server in servers:
            subprocess.run(["pkill", "-P", str(server.pid)])
            server.kill()
            server.wait()


def test_no_server_with_a_fork_ends_for_another(tmp_path: Path) -> None:
    started = {}
    for number in range(spawn.SERVERS):
        (tmp_path / str(number)).touch()
        started[str(tmp_path / str(number))] = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
    try:
        assert wait_until(lambda: all(spawn.has_forks(server.pid) for server in started.values()), 60)
        assert not spawn.has_room(started)
        assert len(started) == spawn.SERVERS
        assert all(server.poll() is None for server in started.values())
    finally:
        for server in started.values():
            subprocess.run(["pkill", "-P", str(server.pid)])
            server.kill()
            server.wait()
