"""Waiting for one stage of a run while others continue."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.futures import PrefectConcurrentFuture

from alignment.tasks.stage import Run, SubmittedStage
from alignment_core.errors import DataError
from tests.tracking.watched import result

LABELS = ("model", "round-1", "report")


@pytest.fixture
def run() -> Run:
    """A run of three stages that have not ended."""
    journal: Any = SimpleNamespace(stage=lambda *_, **__: None)
    none: Any = None
    run = Run(store=none, host=none, resources=none, seed=0, journal=journal)
    for label in LABELS:
        run.steps.append(SubmittedStage(label, PrefectConcurrentFuture(uuid4(), Future()), run))
    return run


def ends(run: Run, number: int, error: Exception | None = None) -> None:
    future: Any = run.steps[number].future
    if error:
        future.wrapped_future.set_exception(error)
    else:
        future.wrapped_future.set_result(result(LABELS[number]).model_dump(mode="json"))


def test_waiting_for_a_stage_reports_earlier_finished_stages_and_no_running_ones(run: Run) -> None:
    ends(run, 0)
    threading.Timer(0.1, ends, (run, 1)).start()
    assert run.steps[1].result().label == "round-1"
    assert run.announced == {"model", "round-1"}
    assert run.steps[0].result().label == "model", "again, and at once"


def test_the_first_stage_that_fails_ends_the_wait_for_another(run: Run) -> None:
    threading.Timer(0.1, ends, (run, 2, DataError("no rows"))).start()
    with pytest.raises(DataError, match="no rows"):
        run.steps[1].result()


def test_a_run_waits_for_all_of_its_stages(run: Run) -> None:
    ends(run, 0)
    ends(run, 2)
    threading.Timer(0.1, ends, (run, 1)).start()
    run.wait()
    assert run.announced == set(LABELS)
