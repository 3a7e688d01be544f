"""The reconciler, ``python -m alignment.flows.service.reconcile``: it marks dead runs as crashed, and resumes crashed runs.

Prefect does not notice the end of a flow process or a machine; such a run stays Running forever. A run that began on this
machine since its last boot is dead if the lock of its journal is free; any other run if its heartbeats are missing as
well. Crashed runs of deployments are scheduled again, a limited number of times and after growing pauses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import httpx
import prefect.exceptions
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Crashed, Scheduled
from pydantic import BaseModel, ConfigDict

from alignment.flows.console import say
from alignment.flows.run_queue import FLOW
from alignment.flows.stale_runs import clear_page
from alignment_core import journal
from alignment_core.errors import NotFound, UserError

EVERY_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""Without a heartbeat for so long, a run that did not begin on this machine since its last boot is dead. Deployments send
one every 30 seconds (prefect.yaml)."""
MOST_RESUMPTIONS = 4
"""Automatic resumptions of a run; afterwards it has to be resumed by hand."""
OUTAGE_SECONDS = 15.0
"""A request that takes so long has waited for the end of an outage."""
FIRST_PAUSE_SECONDS, PAUSE_GROWTH = 3.0, 4.0
"""Pauses before resumptions: 3, 12, 48, 192 seconds. The first one lets the worker report the crash."""
RESUME_WITHIN = timedelta(days=1)
"""Older crashes are not resumed: a person has seen them by then."""
RESUMING = "Resuming"
SKIPPED = "Skipped"
"""State of a scheduled run that was still waiting when the next one of its schedule became due."""
STOPPED = "it was told to stop, and did"
"""Ending of the message of a resumption after an orderly stop, which does not count as a crash."""
BY_HAND = ("AwaitingRetry", "ResumingByHand")
"""States of resumptions by a person: `prefect flow-run retry`, and `align resume`."""
PAGE = 200


class Action(BaseModel):
    """An action of the reconciler on a run."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    name: str
    did: str
    """``crashed``, ``cancelled``, ``resumed``, ``given up`` or ``skipped``."""
    why: str


_Sign = tuple[UUID | None, int]
_Answer = TypeVar("_Answer")


@dataclass
class _Crash:
    """A crash that this reconciler has seen."""

    state: UUID
    seen: float
    resumptions: int
    """Automatic resumptions before this crash."""
    left: bool
    """Whether the run is not resumed any more."""
    stopped: bool
    """Whether the attempt was stopped in order, for example by ``align down``."""

    @property
    def due(self) -> float:
        return self.seen + FIRST_PAUSE_SECONDS * PAUSE_GROWTH**self.resumptions


class Reconciler:
    """The state of the runs between two looks. All waits use this process's clock: clocks of machines differ, and can be
    set."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[UUID, UUID] = {}
        """Runs that looked dead at the last look, with their state: their worker may be about to report it."""
        self._signs: dict[UUID, tuple[_Sign, float]] = {}
        """The last sign of life of each run without a local process, and when it was first seen here."""
        self._crashes: dict[UUID, _Crash] = {}

    def look(self, client: SyncPrefectClient) -> list[Action]:
        """Mark, resume and skip runs once. A run is marked when it looks dead at two looks in a row."""
        return [*self._mark_dead(client), *self._resume_crashed(client), *_skip_superseded(client)]

    def _mark_dead(self, client: SyncPrefectClient) -> Iterator[Action]:
        runs = self._answered(lambda: _runs(client, StateType.RUNNING, StateType.CANCELLING, StateType.PENDING))
        before, self._suspects = self._suspects, {}
        self._signs = {run.id: self._signs[run.id] for run in runs if run.id in self._signs}
        for run in runs:
            why = self._death(client, run)
            if why is None or run.state is None:
                continue
            if before.get(run.id) != run.state.id:
                self._suspects[run.id] = run.state.id
                continue
            mark(client, run, why)
            did = "cancelled" if run.state.is_cancelling() else "crashed"
            yield Action(run_id=str(run.id), name=run.name, did=did, why=why)

    def _death(self, client: SyncPrefectClient, run: FlowRun) -> str | None:
        """Why a run is considered dead; None if it may be alive."""
        with suppress(NotFound):
            record = journal.read(str(run.id))
            if journal.is_alive(record):
                return None
            local = record.is_of_this_boot()  # locks of other machines are not always visible here
            if local and record.run_count == run.run_count and run.state and not run.state.is_pending():
                return f"its process {record.pid} is gone"  # otherwise a later attempt may be starting
        sign, now = self._answered(lambda: _sign(client, run)), self._clock()
        if run.id not in self._signs or self._signs[run.id][0] != sign:
            self._signs[run.id] = sign, now
        silence = now - self._signs[run.id][1]
        return f"no sign of life for {silence:.0f} s" if silence > SILENCE_SECONDS else None

    def _answered(self, request: Callable[[], _Answer]) -> _Answer:
        """The result of a request, in which Prefect's client may wait for the end of an outage."""
        started = self._clock()
        answer = request()
        if self._clock() - started > OUTAGE_SECONDS:
            self.outage()
        return answer

    def outage(self) -> None:
        """Restart the count of silence for all runs: during an outage no heartbeat arrives."""
        self._signs.clear()

    def _resume_crashed(self, client: SyncPrefectClient) -> Iterator[Action]:
        runs = [run for run in _runs(client, StateType.CRASHED) if run.deployment_id is not None]
        self._crashes = {run.id: self._crashes[run.id] for run in runs if run.id in self._crashes}
        for run in runs:
            crash = self._crashes.get(run.id)
            if run.state is not None and (crash is None or crash.state != run.state.id):
                crash = self._crashes[run.id] = self._seen(client, run, run.state)
                if crash.resumptions >= MOST_RESUMPTIONS and not crash.left:
                    crash.left = True
                    why = f"it was resumed automatically {MOST_RESUMPTIONS} times; `align resume` resumes it again"
                    yield Action(run_id=str(run.id), name=run.name, did="given up", why=why)
            if crash is None or crash.left or self._clock() < crash.due or _still_ends(run):
                continue
            attempt = f"attempt {crash.resumptions + 2} of at most {MOST_RESUMPTIONS + 1}"
            schedule_again(client, run, STOPPED if crash.stopped else attempt)
            message = run.state.message if run.state else None
            yield Action(run_id=str(run.id), name=run.name, did="resumed", why=message or "")

    def _seen(self, client: SyncPrefectClient, run: FlowRun, state: State) -> _Crash:
        old = _is_old(state)
        states = [] if old else _in_order(client.read_flow_run_states(run.id))
        resumptions, stopped = _resumptions(states), _was_stopped(run, states)
        return _Crash(state=state.id, seen=self._clock(), resumptions=resumptions, left=old, stopped=stopped)


def _skip_superseded(client: SyncPrefectClient) -> Iterator[Action]:
    """Skip due runs of a schedule if a later one is due as well: otherwise a schedule that is faster than its runs fills the
    queue."""
    due: dict[str, FlowRun] = {}
    now = datetime.now(UTC)
    for run in _runs(client, StateType.SCHEDULED, due_before=now):  # the latest first
        if not run.auto_scheduled or run.run_count:
            continue
        schedule = f"{run.deployment_id} {json.dumps(run.parameters, sort_keys=True, default=str)}"
        later = due.setdefault(schedule, run)
        if later is not run:
            why = f"a later run of its schedule, {later.name}, is due"
            client.set_flow_run_state(run.id, Cancelled(name=SKIPPED, message=f"Skipped: {why}"), force=True)
            yield Action(run_id=str(run.id), name=run.name, did="skipped", why=why)


def _is_old(state: State) -> bool:
    return datetime.now(UTC) - state.timestamp > RESUME_WITHIN


def _in_order(states: Sequence[State]) -> list[State]:
    return sorted(states, key=lambda state: state.timestamp)


def may_resume(run: FlowRun) -> bool:
    """Whether a crashed run is recent and of a deployment: the reconciler resumes no others."""
    return run.deployment_id is not None and run.state is not None and not _is_old(run.state)


def resumes_by_itself(run: FlowRun, states: Sequence[State]) -> bool:
    """Whether the reconciler is going to resume a crashed run, given all its states."""
    return may_resume(run) and _resumptions(_in_order(states)) < MOST_RESUMPTIONS


def _resumptions(states: Sequence[State]) -> int:
    """Automatic resumptions since the last one by a person. Prefect's ``run_count`` leaves out attempts that died before
    they were Running."""
    count = 0
    for state in states:
        crashed = state.name == RESUMING and not (state.message or "").endswith(STOPPED)
        count = 0 if state.name in BY_HAND else count + crashed
    return count


def _was_stopped(run: FlowRun, states: Sequence[State]) -> bool:
    """Whether the last attempt was stopped in order, according to this machine's journal."""
    began = next((state for state in reversed(states) if state.is_running() or state.name == RESUMING), None)
    if began is None or not began.is_running():
        return False  # it died before it was Running; the journal is that of an earlier attempt
    with suppress(NotFound):
        record = journal.read(str(run.id))
        return record.status == "stopped" and record.run_count == run.run_count
    return False


def mark(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Mark a dead run as crashed, or as cancelled if it was being cancelled."""
    cancelling = run.state is not None and run.state.is_cancelling()
    new_state: Any = Cancelled if cancelling else Crashed
    client.set_flow_run_state(run.id, new_state(message=f"Marked: {why}"), force=True)
    clear_page(client, run.id, why)


def _sign(client: SyncPrefectClient, run: FlowRun) -> _Sign:
    """A value that changes while the run is alive: its state and its number of heartbeats. Their times are of no use, as each
    machine has its own clock."""
    events_filter = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run.id}"]},
        "occurred": {"since": "1970-01-01T00:00Z", "until": "9000-01-01T00:00Z"},
    }
    heartbeats = client._client.post("/events/filter", json={"filter": events_filter, "limit": 1}).json()
    return run.state.id if run.state else None, heartbeats["total"]


def _still_ends(run: FlowRun) -> bool:
    """Whether the process of a crashed run is still alive and saving its progress."""
    try:
        return journal.is_alive(journal.read(str(run.id)))
    except NotFound:
        return False


def schedule_again(client: SyncPrefectClient, run: FlowRun, why: str, name: str = RESUMING) -> None:
    """Schedule the run again, before all runs that were due after it; its finished stages are cached."""
    due = run.expected_start_time or datetime.now(UTC)
    state: State = Scheduled(scheduled_time=due, name=name, message=f"Goes on: {why}")
    client.set_flow_run_state(run.id, state, force=True)


def mark_if_open(run_id: str, why: str) -> None:
    """Mark a dead run, unless its state on the server is final or the server does not have it."""
    with get_client(sync_client=True) as client, suppress(prefect.exceptions.ObjectNotFound):
        run = client.read_flow_run(UUID(run_id))
        if run.state is not None and not run.state.is_final():
            mark(client, run, why)


def resume_now(run_id: str, from_stage: str | None, why: str) -> str:
    """Schedule a dead run of a deployment again, and return its id.

    With ``from_stage``, a new run of the deployment is created instead, whose other stages are cached.
    """
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(run_id))
        if run.deployment_id is None:
            raise UserError(f"run {run_id} has no deployment; run its recipe again with `align run`")
        mark_if_open(run_id, why)
        if from_stage is None:
            state = client.read_flow_run(run.id).state
            if state is None or state.is_final():  # otherwise the reconciler has resumed it already
                schedule_again(client, run, "asked for by `align resume`", BY_HAND[-1])
            return run_id
        form = client.read_deployment(run.deployment_id).parameter_openapi_schema or {}
        if "from_stage" not in form.get("properties", {}):
            raise UserError(
                f"--from-stage {from_stage}: the deployed flow has no parameter `from_stage`; give it one, hand it on to "
                "`alignment.run(settings, from_stage)`, and deploy it again"
            )
        parameters = {**run.parameters, "from_stage": from_stage}
        return str(client.create_flow_run_from_deployment(run.deployment_id, parameters=parameters).id)


def _runs(client: SyncPrefectClient, *types: StateType, due_before: datetime | None = None) -> list[FlowRun]:
    due = None if due_before is None else {"before_": due_before}
    return client.read_flow_runs(
        flow_filter=FlowFilter.model_validate({"name": {"any_": [FLOW]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": types}}, "expected_start_time": due}),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )


def main() -> int:
    """Entry point: reconcile every few seconds, and log each action."""
    reconciler = Reconciler()
    while True:
        try:
            with get_client(sync_client=True) as client:
                while True:
                    for action in reconciler.look(client):
                        say(f"{action.name}: {action.did}: {action.why}")
                    time.sleep(EVERY_SECONDS)
        except (prefect.exceptions.PrefectException, httpx.HTTPError, OSError, RuntimeError) as error:
            say(f"the server does not answer: {error}")
            reconciler.outage()
            time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
