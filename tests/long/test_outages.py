"""A run of the worker trains through an outage of the server's database and through the death of the worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from alignment_core import journal
from tests.deployments.conftest import PostgreSQL
from tests.deployments.endings import OVERRIDES, steps, training
from tests.deployments.up import Services
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OUTAGE_SECONDS = 40.0
"""The longest of those after which each run of the worker had ended."""


def restarts(services: Services) -> dict[str, int]:
    return {service["name"]: service["restarts"] for service in services.align("status")["services"]["services"]}


def test_a_run_keeps_training_without_the_database_and_after_the_worker_dies(
    services: Services, postgres: PostgreSQL
) -> None:
    """One attempt, one host: its record names the process that trained all the time."""
    endless = ["sft.training.num_train_epochs=100000", "sft.training.max_steps=200000", "seed=32"]
    run_id = services.start_run([*OVERRIDES, *endless])
    assert wait_until(lambda: training(run_id), 180), services.states(run_id)
    before, process = restarts(services), journal.read(run_id).pid

    postgres.stop()
    time.sleep(OUTAGE_SECONDS)
    assert services.ask("/work_pools/alignment", token=services.token).status_code == 503
    assert services.ask("/csrf-token?client=somebody", token=services.token).status_code == 503
    postgres.start()
    assert wait_until(lambda: services.ask("/work_pools/alignment", token=services.token).status_code == 200, 60)
    trained = steps(run_id)
    assert wait_until(lambda: steps(run_id) > trained, 60)
    assert restarts(services) == before

    os.kill(services.pid("worker"), signal.SIGKILL)
    assert wait_until(lambda: restarts(services)["worker"] == before["worker"] + 1, 60)
    trained = steps(run_id)
    assert wait_until(lambda: steps(run_id) > trained, 60)

    record = journal.read(run_id)
    assert (record.attempt, record.pid, journal.is_alive(record)) == (1, process, True)
    assert [name for name, _ in services.states(run_id)][-1] == "Running"
    services.prefect("flow-run", "cancel", run_id)
    assert wait_until(lambda: services.state(run_id) == "Cancelled", 120), services.states(run_id)
    assert wait_until(lambda: not journal.is_alive(journal.read(run_id)), 60)
