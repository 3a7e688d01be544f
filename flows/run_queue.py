"""The queue of the work pool: how many runs take place at once, and which come first.

Every run has a host, a Ray and engines of its own, so that a few at once fill a machine's memory. The pool therefore has a
limit, which Prefect's server applies: further runs wait. Runs are taken up in the order in which they were due, and one that
crashed and resumes keeps its place: as long as it waits for its resumption, no later run takes it.
"""

from __future__ import annotations

import os
import textwrap
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from alignment.flows import access
from alignment_core.errors import UserError
from alignment_core.journal import short_id

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import WorkPool

POOL = "alignment"
MAX_RUNS = 1
"""Runs at once in a pool whose limit nobody has set."""
VARIABLE = "ALIGN_MAX_RUNS"
ACTIVE = ("RUNNING", "PENDING")
"""States that Prefect's server counts against the limit."""
SHOWN = 200
WIDTH = 40
"""Characters of a run's name that are shown."""


class Queue(BaseModel):
    """The pool as its server has it now."""

    model_config = ConfigDict(frozen=True)

    max_runs: int | None
    running: tuple[str, ...]
    """The runs under way: id and name."""
    waiting: tuple[str, ...]
    """Ids of the runs that are due, in the order in which they are taken up."""

    def reason(self, run_id: str) -> str | None:
        """Why a run waits; None where it does not wait for the others."""
        if run_id not in self.waiting or self.max_runs is None or len(self.running) < self.max_runs:
            return None
        place = self.waiting.index(run_id) + 1
        return f"waits for {', '.join(self.running)}: {limit_in_words(self.max_runs)}; place {place} in the queue"


def limit_in_words(max_runs: int | None) -> str:
    """What the limit of a pool means."""
    if max_runs is None:
        return "the worker has no limit of runs at a time"
    runs = "run" if max_runs == 1 else "runs"
    return f"the worker's limit is {max_runs} {runs} at a time (`align up --max-runs` changes it)"


def max_runs_from(environment: str | None) -> int | None:
    """The number that the variable holds. Raises UserError."""
    if not environment:
        return None
    if not environment.isdigit() or not int(environment):
        raise UserError(f"{VARIABLE}={environment}: must be a number of runs, 1 or more")
    return int(environment)


def set_limit(client: SyncPrefectClient, pool: WorkPool, max_runs: int | None) -> int:
    """Give the pool its limit: ``max_runs``, otherwise the one that it has, otherwise the default."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    chosen = max_runs or pool.concurrency_limit or MAX_RUNS
    if chosen != pool.concurrency_limit:
        client.update_work_pool(pool.name, WorkPoolUpdate(concurrency_limit=chosen))
    return chosen


def change_limit(max_runs: int) -> None:
    """Change the limit of services that run."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        set_limit(client, client.read_work_pool(POOL), max_runs)


def read() -> Queue | None:
    """The queue of the server that the environment names; None where it does not answer, or has no such pool.

    Without Prefect's client, which takes seconds to import.
    """
    if not os.environ.get(access.URL):
        return None
    import httpx

    with (
        suppress(httpx.HTTPError),
        httpx.Client(base_url=os.environ[access.URL], headers=access.headers(), timeout=10) as client,
    ):
        asker = {"prefect-csrf-client": str(uuid.uuid4())}
        granted = client.get("/csrf-token", params={"client": asker["prefect-csrf-client"]})
        if granted.is_success:  # otherwise the server asks for none
            client.headers.update({**asker, "prefect-csrf-token": granted.json()["token"]})

        def runs(states: Sequence[str], sort: str) -> list[dict[str, Any]]:
            chosen = {
                "flow_runs": {"state": {"type": {"any_": list(states)}}},
                "work_pools": {"name": {"any_": [POOL]}},
            }
            answer = client.post("/flow_runs/filter", json={**chosen, "sort": sort, "limit": SHOWN})
            found: list[dict[str, Any]] = answer.raise_for_status().json()
            return found

        running = runs(ACTIVE, "START_TIME_ASC")
        now = datetime.now(UTC)
        scheduled = runs(["SCHEDULED"], "NEXT_SCHEDULED_START_TIME_ASC")
        due = [run for run in scheduled if datetime.fromisoformat(run["next_scheduled_start_time"]) <= now]
        return Queue(
            max_runs=client.get(f"/work_pools/{POOL}").raise_for_status().json()["concurrency_limit"],
            running=tuple(f"{short_id(run['id'])} ({textwrap.shorten(run['name'], WIDTH)})" for run in running),
            waiting=tuple(run["id"] for run in due),
        )
    return None


def in_pool(*states: str) -> dict[str, Any]:
    """Arguments with which Prefect's clients read the pool's runs in these states."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    types = FlowRunFilterStateType(any_=[StateType(state) for state in states])
    return {
        "flow_run_filter": FlowRunFilter(state=FlowRunFilterState(type=types)),
        "work_pool_filter": WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
    }
