"""Making Prefect's view match reality: runs whose process died are marked as crashed, and resumed where they stopped.

A machine that dies says nothing to the server, and its runs would stay Running for ever.
``python -m alignment.flows.service.reconcile`` looks at them every few seconds. A run of this machine since its last boot is
dead when the lock of its journal is free; any other one when its heartbeat is missed, too. Crashed runs of deployments are
scheduled again, a bounded number of times and after growing pauses.
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
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
)
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypes
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Crashed, Scheduled
from pydantic import BaseModel, ConfigDict

from alignment.flows.console import say
from alignment.flows.stale_runs import clear_page
from alignment_core import journal
from alignment_core.errors import NotFound, UserError

FLOW = "alignment"
EVERY_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""A run that did not begin on this machine since its last boot is dead after so long without a heartbeat; prefect.yaml asks
for one every 30."""
MOST_RESUMPTIONS = 4
"""How often a run is resumed automatically before somebody has to resume it by hand."""
OUTAGE_SECONDS = 15.0
"""A server that takes so long to answer was away."""
FIRST_PAUSE_SECONDS, PAUSE_GROWTH = 3.0, 4.0
"""From a crash to the first resumption, by when the worker has said what it has to say; each later pause is so many times
as long: 3, 12, 48, 192 seconds."""
RESUME_WITHIN = timedelta(days=1)
"""Older crashes are left alone: somebody has seen them by now."""
RESUMING = "Resuming"
SKIPPED = "Skipped"
"""State of a scheduled run that waited until the next one was due."""
STOPPED = "it was told to stop, and did"
"""Why a run goes on that did not crash: such an attempt counts for nothing."""
BY_HAND = ("AwaitingRetry", "ResumingByHand")
"""States with which a person lets a run go on: `prefect flow-run retry`, and `align resume`."""
PAGE = 200


class Action(BaseModel):
    """What was done about a run."""

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
    """A crash that this process has seen."""

    state: UUID
    seen: float
    resumptions: int
    """How often the run had gone on by itself before."""
    left: bool
    """Whether the run is left alone from now on."""
    stopped: bool
    """Whether it had saved its work when it was told to end, by ``align down`` say: that is no crash of its own."""

    @property
    def due(self) -> float:
        return self.seen + FIRST_PAUSE_SECONDS * PAUSE_GROWTH**self.resumptions


class Reconciler:
    """What was seen of the runs so far. All waits are measured here: clocks of several machines differ, and are set."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[UUID, UUID] = {}
        """Runs that looked dead, and their state then: their worker may be about to say what became of them."""
        self._signs: dict[UUID, tuple[_Sign, float]] = {}
        """The last sign of life of each run that only its heartbeat tells of, and when it was first seen here."""
        self._crashes: dict[UUID, _Crash] = {}

    def look(self, client: SyncPrefectClient) -> list[Action]:
        """Look once at all runs and set right what is not; a run is marked when it looks dead for the second time."""
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
        """Why a run is held for dead; None while it may live."""
        with suppress(NotFound):
            record = journal.read(str(run.id))
            if journal.is_alive(record):
                return None
            local = record.is_of_this_boot()  # whether another machine holds the lock is not always seen here
            if local and record.run_count == run.run_count and run.state and not run.state.is_pending():
                return f"its process {record.pid} is gone"  # otherwise a later attempt may be starting
        sign, now = self._answered(lambda: _sign(client, run)), self._clock()
        if run.id not in self._signs or self._signs[run.id][0] != sign:
            self._signs[run.id] = sign, now
        silence = now - self._signs[run.id][1]
        return f"no sign of life for {silence:.0f} s" if silence > SILENCE_SECONDS else None

    def _answered(self, ask: Callable[[], _Answer]) -> _Answer:
        """What the server answers; Prefect's client waits for the end of an outage."""
        asked = self._clock()
        answer = ask()
        if self._clock() - asked > OUTAGE_SECONDS:
            self.outage()
        return answer

    def outage(self) -> None:
        """Count the silence of all runs from now: while the server was away, no heartbeat arrived."""
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
    """Skip due runs of a schedule of which a later one is due, too: a schedule that is faster than its runs would queue ever
    more of them."""
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
    """Whether a crashed run is recent and of a deployment, so that a reconciler resumes it unless it has done so too often."""
    return run.deployment_id is not None and run.state is not None and not _is_old(run.state)


def resumes_by_itself(run: FlowRun, states: Sequence[State]) -> bool:
    """Whether a reconciler is going to resume a crashed run, given all its states."""
    return may_resume(run) and _resumptions(_in_order(states)) < MOST_RESUMPTIONS


def _resumptions(states: Sequence[State]) -> int:
    """How often the run went on by itself after a crash since a person last let it. Prefect's ``run_count`` would not do:
    it leaves out attempts that died before they were Running."""
    count = 0
    for state in states:
        crashed = state.name == RESUMING and not (state.message or "").endswith(STOPPED)
        count = 0 if state.name in BY_HAND else count + crashed
    return count


def _was_stopped(run: FlowRun, states: Sequence[State]) -> bool:
    """Whether the attempt that the last of ``states`` is about ended in order, as far as this machine's journal knows."""
    began = next((state for state in reversed(states) if state.is_running() or state.name == RESUMING), None)
    if began is None or not began.is_running():
        return False  # it died before it was Running: what the journal knows is about an earlier attempt
    with suppress(NotFound):
        record = journal.read(str(run.id))
        return record.status == "stopped" and record.run_count == run.run_count
    return False


def mark(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Give a run whose process is dead the state that says so."""
    cancelling = run.state is not None and run.state.is_cancelling()
    say: Any = Cancelled if cancelling else Crashed
    client.set_flow_run_state(run.id, say(message=f"Marked: {why}"), force=True)
    clear_page(client, run.id, why)


def _sign(client: SyncPrefectClient, run: FlowRun) -> _Sign:
    """What changes while the run lives: its state, and how many heartbeats were heard; their times say little, because
    each machine has its own clock."""
    resource, always = (
        {"id": [f"prefect.flow-run.{run.id}"]},
        {"since": "1970-01-01T00:00Z", "until": "9000-01-01T00:00Z"},
    )
    asked = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource, "occurred": always}
    heard = client._client.post("/events/filter", json={"filter": asked, "limit": 1}).json()
    return run.state.id if run.state else None, heard["total"]


def _still_ends(run: FlowRun) -> bool:
    """Whether the crashed process is still there, saving its work."""
    try:
        return journal.is_alive(journal.read(str(run.id)))
    except NotFound:
        return False


def schedule_again(client: SyncPrefectClient, run: FlowRun, why: str, name: str = RESUMING) -> None:
    """Let a worker take the run up again, before all that were due after it; its finished stages are cached."""
    due = run.expected_start_time or datetime.now(UTC)
    state: State = Scheduled(scheduled_time=due, name=name, message=f"Goes on: {why}")
    client.set_flow_run_state(run.id, state, force=True)


def mark_if_open(run_id: str, why: str) -> None:
    """Mark a run whose process is dead, unless the server knows that it ended or does not know it at all."""
    with get_client(sync_client=True) as client, suppress(prefect.exceptions.ObjectNotFound):
        run = client.read_flow_run(UUID(run_id))
        if run.state is not None and not run.state.is_final():
            mark(client, run, why)


def resume_now(run_id: str, from_stage: str | None, why: str) -> str:
    """Let a worker take up a deployment's run whose process is dead; the id of the run that goes on.

    With ``from_stage`` that is a new run of the same deployment, which finds all other stages cached.
    """
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(run_id))
        if run.deployment_id is None:
            raise UserError(f"run {run_id} has no deployment; run its recipe again with `align run`")
        mark_if_open(run_id, why)
        if from_stage is None:
            state = client.read_flow_run(run.id).state
            if state is None or state.is_final():  # otherwise the reconciler was faster
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
    due = None if due_before is None else FlowRunFilterExpectedStartTime(before_=due_before)
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=StateTypes(any_=list(types))), expected_start_time=due
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )


def main() -> int:
    """Entry point: look, act, say what was done, wait; for ever."""
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
