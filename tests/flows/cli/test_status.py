"""The output of `align status` on services, the queue and runs."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.flows.cli.services import _print_status
from alignment.flows.run_queue import Queue
from alignment.flows.service.services import State

SAME_INSERTION = ("01a2146e-b981-7190-bf52-85b29d2fad1e", "01a2146e-b981-7c7e-9c61-1c9850d1203d")
"""Two runs of one schedule, as Prefect's scheduler named them: UUIDs of version 7, whose first 12 digits are the time."""


@pytest.fixture
def state() -> State:
    return State(pid=1, started=1, boot="here", url="http://127.0.0.1:4200/api", database="sqlite", phase="ready")


def row(run: str) -> dict[str, Any]:
    return {
        "run": run, "name": "small", "started": "", "status": "running", "attempt": 1, "deployed": True, "doing": {}
    }  # fmt: skip


def test_status_reports_that_the_queue_is_unknown(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    """The processes live while the server's database is away, so that the services are ready all the same."""
    _print_status(state, None, [])
    assert "the server does not answer: it is unknown which runs wait" in capsys.readouterr().out


def test_status_shows_distinct_ids_for_runs_of_the_same_schedule(
    state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    running, waiting = SAME_INSERTION
    queue = Queue(max_runs=1, running=("01a2146e-b981-7190-bf52 (small)",), waiting=(waiting,))
    _print_status(state, queue, [row(running)])
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "01a2146e" in line]
    assert first_words == ["01a2146e-b981-7c7e-9c61", "01a2146e-b981-7190-bf52"]
