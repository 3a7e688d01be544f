"""`align watch` of runs that are only in this machine's journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignment.flows import access
from alignment.flows.service import follow
from alignment_core.errors import EnvironmentFault
from alignment_core.journal import Journal, new_record
from tests.answering import answering

RUN = """
import sys, time
from alignment_core.journal import Journal, new_record
with Journal(new_record("run", "small", {}, "store")).open() as journal:
    journal.stage("sft", "running", stage="sft", key="k", key_parts={})
    print("open", flush=True)
    sys.stdin.read()
    journal.stage("sft", "run", seconds=1.5)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    monkeypatch.delenv(access.URL, raising=False)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.05)


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def running_of_worker() -> Iterator[subprocess.Popen[bytes]]:
    code = RUN.replace('"store")', '"store", deployed=True)')
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_is_followed_to_its_completion(running: subprocess.Popen[bytes]) -> None:
    lines: list[str] = []

    def received(line: str) -> None:
        lines.append(line)
        assert running.stdin is not None
        running.stdin.close()  # it continues after its first line was printed

    ending = follow.follow("run", received)
    assert (ending.status, ending.attempt, ending.message) == ("completed", 1, None)
    assert lines == ["sft: running", "sft: run, 1.5 s"]


def test_a_dead_run_of_this_machine_is_reported_as_crashed(running: subprocess.Popen[bytes]) -> None:
    threading.Timer(0.2, os.kill, (running.pid, signal.SIGKILL)).start()
    assert follow.follow("run", lambda _: None).status == "crashed"


def test_a_failed_run_has_its_error_message() -> None:
    with pytest.raises(ValueError, match="too long"), Journal(new_record("run", "small", {}, "store")).open():
        raise ValueError("row 3 is too long")
    ending = follow.follow("run", lambda _: None)
    assert (ending.status, ending.message) == ("failed", "row 3 is too long")


Serve = Callable[[int, bytes], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Name a server in the environment that answers this to everything."""
    with ExitStack() as stack:

        def start(code: int, body: bytes) -> None:
            port, _ = stack.enter_context(answering(code, body))
            monkeypatch.setenv(access.URL, access.url_of(port))

        yield start


@pytest.mark.parametrize(
    ("code", "body", "sentence"),
    [
        (404, b'{"detail": "Flow run not found"}', "unknown run elsewhere: http://.* has no run with this id"),
        (
            401,
            b'{"exception_message": "Unauthorized"}',
            r'this shell has none or a different one; eval "\$\(align env\)"',
        ),
        (200, b"<html>", "answers 200, which is no answer of a Prefect server: is PREFECT_API_URL right"),
        (200, b"{}", "answers 200, which is no answer of a Prefect server: is PREFECT_API_URL right"),
    ],
)
def test_a_server_that_cannot_answer_about_the_run_is_an_error(
    serve: Serve, code: int, body: bytes, sentence: str
) -> None:
    serve(code, body)
    with pytest.raises(EnvironmentFault, match=sentence):
        follow.follow("elsewhere", lambda _: None)


def test_a_busy_server_is_waited_for_up_to_a_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "GONE_SECONDS", 0.3)
    lines: list[str] = []
    serve(503, b"<html>")
    with pytest.raises(EnvironmentFault, match="does not answer, so that nothing continues run elsewhere"):
        follow.follow("elsewhere", lines.append)
    (line,) = lines
    assert line.endswith(" does not answer; waiting for 0.3 s")


def test_a_workers_run_whose_services_are_gone_ends_the_watch_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "GONE_SECONDS", 0.2)
    with Journal(new_record("run", "small", {}, "store", deployed=True)).open() as journal:
        journal.end("stopped")
    lines: list[str] = []
    with pytest.raises(
        EnvironmentFault, match=r"no services are running, .* \(its status here is stopped\): `align up`"
    ):
        follow.follow("run", lines.append)
    assert lines == ["no services are running; waiting for 0.2 s"]


def test_a_workers_run_that_is_alive_is_followed_without_services(
    monkeypatch: pytest.MonkeyPatch, running_of_worker: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(follow, "GONE_SECONDS", 0.2)
    lines: list[str] = []

    def received(line: str) -> None:
        lines.append(line)
        if line == "sft: running":
            threading.Timer(0.5, running_of_worker.stdin.close).start()  # type: ignore[union-attr]

    assert follow.follow("run", received).status == "completed"
    assert lines[:2] == ["no services are running; the run continues", "sft: running"]
    assert "sft: run, 1.5 s" in lines


def test_a_run_of_this_machine_that_the_server_does_not_know_is_followed_by_its_journal(serve: Serve) -> None:
    with Journal(new_record("run", "small", {}, "store")).open():
        pass
    serve(404, b'{"detail": "Flow run not found"}')
    assert follow.follow("run", lambda _: None).status == "completed"


def test_following_an_unknown_run_is_an_error() -> None:
    with pytest.raises(EnvironmentFault, match="no services run, and no run elsewhere was started here"):
        follow.follow("elsewhere", lambda _: None)
