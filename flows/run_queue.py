"""The queue of the work pool: its limit of concurrent runs, and the order of the others.

Every run has its own host, Ray and engines, so a few at once fill a machine's memory. The pool therefore has a limit, which
Prefect's server enforces. Runs start in the order in which they were due. A crashed run keeps its place until it resumes.
"""

from __future__ import annotations

import os
import textwrap
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

FLOW, POOL = "alignment", "alignment"
"""Names of the flow of all deployments, and of their work pool."""
MAX_RUNS = 1
"""Default limit of concurrent runs."""
VARIABLE = "ALIGN_MAX_RUNS"
ACTIVE = ("RUNNING", "PENDING")
"""States that Prefect's server counts against the limit."""
SHOWN = 200
WIDTH = 40
"""Characters of a run's name that are shown."""


class Queue(BaseModel):
    """The state of the pool on its server."""

    model_config = ConfigDict(frozen=True)

    max_runs: int | None
    running: tuple[str, ...]
    """Running runs: id and name."""
    waiting: tuple[str, ...]
    """Ids of the runs that are due, in the order in which they will start."""

    def reason(self, run_id: str) -> str | None:
        """Why a run waits; None if it does not wait for other runs."""
        if run_id not in self.waiting or self.max_runs is None or len(self.running) < self.max_runs:
            return None
        place = self.waiting.index(run_id) + 1
        return f"waits for {', '.join(self.running)}: {limit_in_words(self.max_runs)}; place {place} in the queue"


def limit_in_words(max_runs: int | None) -> str:
    """The limit of a pool in words."""
    if max_runs is None:
        return "the worker has no limit of runs at a time"
    runs = "run" if max_runs == 1 else "runs"
    return f"the worker's limit is {max_runs} {runs} at a time (`align up --max-runs` changes it)"


def max_runs_from(environment: str | None) -> int | None:
    """The limit in the environment variable, if it is set. Raises UserError."""
    if not environment:
        return None
    if not environment.isdigit() or not int(environment):
        raise UserError(f"{VARIABLE}={environment}: must be a number of runs, 1 or more")
    return int(environment)


def set_limit(client: SyncPrefectClient, pool: WorkPool, max_runs: int | None) -> int:
    """Set the pool's limit: ``max_runs``, by default the present limit, or MAX_RUNS."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    chosen = max_runs or pool.concurrency_limit or MAX_RUNS
    if chosen != pool.concurrency_limit:
        client.update_work_pool(pool.name, WorkPoolUpdate(concurrency_limit=chosen))
    return chosen


def change_limit(max_runs: int) -> None:
    """Change the limit of running services."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        set_limit(client, client.read_work_pool(POOL), max_runs)


def read() -> Queue | None:
    """The queue on the server in the environment; None if it does not answer, or has no such pool."""
    if not os.environ.get(access.URL):
        return None
    import httpx

    with suppress(httpx.HTTPError), access.client() as client:

        def runs(states: Sequence[str], sort: str) -> list[dict[str, Any]]:
            chosen = {
                "flow_runs": {"state": {"type": {"any_": list(states)}}},
                "work_pools": {"name": {"any_": [POOL]}},
            }
            answer = client.post("/flow_runs/filter", json={**chosen, "sort": sort, "limit": SHOWN})
            flow_runs: list[dict[str, Any]] = answer.raise_for_status().json()
            return flow_runs

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
    """Arguments of Prefect's clients that select the pool's runs in these states."""
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    return {
        "flow_run_filter": FlowRunFilter.model_validate({"state": {"type": {"any_": states}}}),
        "work_pool_filter": WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
    }
