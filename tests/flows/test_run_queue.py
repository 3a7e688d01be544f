"""The number of concurrent runs of a worker, their order, and the reasons shown for waiting ones."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed, Running, Scheduled

from alignment.flows import access, deployments, run_queue
from alignment.flows.service.admission import admitted as admitted_runs
from alignment.flows.service.reconcile import MOST_RESUMPTIONS, RESUMING, Reconciler, schedule_again
from alignment_core.errors import UserError

NOW = datetime.now(UTC)


def test_a_waiting_run_names_the_running_runs_and_its_place() -> None:
    queue = run_queue.Queue(max_runs=1, running=("1a2b3c4d (nightly)",), waiting=("first", "second"))
    reason = queue.reason("second")
    assert reason is not None
    assert "waits for 1a2b3c4d (nightly)" in reason
    assert "the worker's limit is 1 run at a time (`align up --max-runs` changes it)" in reason
    assert reason.endswith("place 2 in the queue")
    assert str(queue.reason("first")).endswith("place 1 in the queue")
    assert queue.reason("unknown") is None
    assert run_queue.Queue(max_runs=2, running=("one",), waiting=("first",)).reason("first") is None


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_a_limit_that_is_no_number_of_runs_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="must be a number of runs"):
        run_queue.max_runs_from(given)


class Client:
    """Stands for the client of a worker, whose server has these crashed and running runs."""

    def __init__(self, crashed: list[list[State]], active: int) -> None:
        self.states = {uuid.uuid4(): states for states in crashed}
        self.active = active
        self.requested: list[uuid.UUID] = []

    async def read_flow_runs(
        self, flow_run_filter: Any, flow_filter: Any = None, sort: Any = None, **_: Any
    ) -> list[Any]:
        if "CRASHED" not in [kind.value for kind in flow_run_filter.state.type.any_]:
            return [object()] * self.active
        assert sort == FlowRunSort.EXPECTED_START_TIME_DESC, "the server gives 200 at most, by default in any order"
        assert flow_filter.name.any_ == ["alignment"], "crashed runs of other flows are not resumed by themselves"
        return [
            FlowRun(id=run_id, flow_id=uuid.uuid4(), deployment_id=uuid.uuid4(), state=states[-1])
            for run_id, states in self.states.items()
        ]

    async def read_flow_run_states(self, run_id: uuid.UUID) -> list[State]:
        self.requested.append(run_id)
        return self.states[run_id]


GIVEN_UP = [
    Running(),
    *(state for _ in range(MOST_RESUMPTIONS) for state in (Crashed(), Scheduled(name=RESUMING))),
    Crashed(),
]
OLD = Crashed().model_copy(update={"timestamp": NOW - timedelta(days=3)})


@pytest.mark.parametrize(
    ("limit", "active", "crashed", "due", "admitted"),
    [
        (1, 0, [], [0, 0], [0, 0]),  # the server itself truncates results at its limit
        (1, 0, [[Running(), Crashed()]], [0], []),
        (1, 0, [[Running(), Crashed()]], [0, 2], [2]),
        (2, 0, [[Running(), Crashed()]], [0, 0], [0]),
        (2, 1, [[Running(), Crashed()]], [0], []),
        (3, 0, [[Running(), Crashed()]], [0, 1, 0], [1, 0]),
        (1, 0, [GIVEN_UP], [0], [0]),
        (1, 0, [[OLD]], [0], [0]),
        (None, 5, [[Running(), Crashed()]], [0], [0]),
    ],
    ids=[
        "none crashed",
        "its place is kept",
        "resumes",
        "one of two",
        "the last of two",
        "all three",
        "given up",
        "old",
        "no limit",
    ],
)
def test_no_later_run_takes_the_place_of_a_run_about_to_resume(
    limit: int | None, active: int, crashed: list[list[State]], due: list[int], admitted: list[int]
) -> None:
    """``due`` and ``admitted`` count how often each run was running before. New runs have the places that the limit leaves
    beside runs that are running, resuming, or about to resume.
    """
    given: Any = [SimpleNamespace(flow_run=SimpleNamespace(run_count=count)) for count in due]
    client: Any = Client(crashed, active)
    runs = asyncio.run(admitted_runs(client, limit, given))
    assert [run.flow_run.run_count for run in runs] == admitted


def test_workers_do_not_query_the_states_of_old_crashes() -> None:
    client: Any = Client([*[[Running(), OLD]] * 150, [Running(), Crashed()]], 0)
    due: Any = [SimpleNamespace(flow_run=SimpleNamespace(run_count=0))]
    assert asyncio.run(admitted_runs(client, 2, due)) == due
    assert len(client.requested) == 1, "of the one that may resume"


@pytest.fixture
def client(prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """Of a real server."""
    for name, value in prefect_api.items():
        monkeypatch.setenv(name, value)
    with SyncPrefectClient(api=os.environ[access.URL], auth_string=os.environ[access.TOKEN]) as client:
        yield client


@pytest.mark.slow
def test_the_default_limit_is_1_and_a_changed_limit_is_kept(client: SyncPrefectClient) -> None:
    assert deployments.create_pool(client, run_queue.POOL, None) == 1
    assert client.read_work_pool(run_queue.POOL).concurrency_limit == 1
    assert deployments.create_pool(client, run_queue.POOL, 3) == 3
    assert deployments.create_pool(client, run_queue.POOL, None) == 3
    client.update_work_pool(run_queue.POOL, WorkPoolUpdate(concurrency_limit=None))  # as versions before had it
    assert deployments.create_pool(client, run_queue.POOL, None) == 1


@pytest.mark.slow
def test_a_resuming_run_precedes_later_runs_and_a_schedule_queues_a_single_run(client: SyncPrefectClient) -> None:
    """Prefect's server gives a worker the runs in the order in which they are due."""
    deployments.create_pool(client, run_queue.POOL, 1)
    flow = client.create_flow_from_name(run_queue.FLOW)
    deployment = client.create_deployment(flow, "queue", work_pool_name=run_queue.POOL)

    def due(minutes: float, **fields: Any) -> FlowRun:
        state = Scheduled(scheduled_time=datetime.now(UTC) - timedelta(minutes=minutes))
        run = client.create_flow_run_from_deployment(deployment, state=state)
        if fields:
            client._client.patch(f"/flow_runs/{run.id}", json=fields)
        return run

    def taken_up() -> list[Any]:
        body = {"scheduled_before": datetime.now(UTC).isoformat()}
        path = f"/work_pools/{run_queue.POOL}/get_scheduled_flow_runs"
        return [entry["flow_run"]["id"] for entry in client._client.post(path, json=body).json()]

    first, second = due(9), due(6)
    assert taken_up() == [str(first.id)]
    client.set_flow_run_state(first.id, Running(), force=True)
    assert taken_up() == []
    queue = run_queue.read()
    assert queue is not None
    assert queue.waiting == (str(second.id),)
    assert str(first.id)[:8] in str(queue.reason(str(second.id)))

    client.set_flow_run_state(first.id, Crashed(), force=True)
    schedule_again(client, client.read_flow_run(first.id), "attempt 2")
    assert taken_up() == [str(first.id)]

    assert Reconciler().look(client) == [], "runs requested by a user are never skipped"


def test_only_the_latest_due_run_of_a_schedule_waits() -> None:
    deployment, other = uuid.uuid4(), uuid.uuid4()

    def run(
        minute: int, of: uuid.UUID = deployment, auto: bool = True, parameters: dict[str, int] | None = None
    ) -> FlowRun:
        return FlowRun(
            id=uuid.uuid4(),
            name=f"at {minute}",
            flow_id=uuid.uuid4(),
            deployment_id=of,
            state=Scheduled(),
            auto_scheduled=auto,
            expected_start_time=NOW - timedelta(minutes=60 - minute),
            parameters=parameters or {},
        )

    runs = [run(5), run(4), run(4, of=other), run(4, auto=False), run(4, parameters={"seed": 2}), run(3)]
    skipped: dict[uuid.UUID, State] = {}

    class Scheduler:
        def read_flow_runs(self, flow_run_filter: Any, **_: Any) -> list[FlowRun]:
            return runs if flow_run_filter.expected_start_time else []

        def set_flow_run_state(self, run_id: uuid.UUID, state: State, force: bool) -> None:
            skipped[run_id] = state

    client: Any = Scheduler()
    assert [(action.name, action.did) for action in Reconciler().look(client)] == [
        ("at 4", "skipped"),
        ("at 3", "skipped"),
    ]
    assert set(skipped) == {runs[1].id, runs[5].id}
    assert {state.name for state in skipped.values()} == {"Skipped"}
