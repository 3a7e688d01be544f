"""Making Prefect's view agree with what is: runs whose process died are marked, and go on where they stopped.

A machine that dies says nothing to the server, and its runs would stay Running for ever. ``python -m flows.reconcile`` looks
at them every few seconds. A run of this machine is dead when the lock of its journal is free; of another machine, when its
heartbeat is missed. Crashed runs of deployments are scheduled again, a bounded number of times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import prefect.exceptions
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypes
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Crashed, Scheduled
from pydantic import BaseModel, ConfigDict

from alignment_core import journal
from alignment_core.errors import NotFound, UserError
from flows.console import say

FLOW = "alignment"
EVERY_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""A run without a journal on this machine is dead after so long without a heartbeat; prefect.yaml asks for one every 30."""
MOST_ATTEMPTS = 5
RESUME_AFTER = timedelta(seconds=3)
"""Until then the worker may have something to say about the crash."""
RESUME_WITHIN = timedelta(days=1)
"""Older crashes are left alone: somebody has seen them by now."""
CLOCKS_DIFFER = timedelta(seconds=5)
PAGE = 200


class Action(BaseModel):
    """What was done about a run."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    name: str
    did: str
    """``crashed``, ``cancelled`` or ``resumed``."""
    why: str


Suspects = dict[UUID, UUID | None]
"""Runs that looked dead, and the state that they had then: their worker may be about to say what became of them."""


def reconcile(client: SyncPrefectClient, suspects: Suspects, moment: datetime | None = None) -> list[Action]:
    """Look once at all runs and set right what is not; a run is marked when it looks dead for the second time."""
    moment = moment or datetime.now(UTC)
    return [*_mark_dead(client, suspects, moment), *_resume_crashed(client, moment)]


def _mark_dead(client: SyncPrefectClient, suspects: Suspects, moment: datetime) -> Iterator[Action]:
    before = dict(suspects)
    suspects.clear()
    for run in _runs(client, StateType.RUNNING, StateType.CANCELLING, StateType.PENDING):
        why = _death(client, run, moment)
        if why is None or run.state is None:
            continue
        if before.get(run.id) != run.state.id:
            suspects[run.id] = run.state.id
            continue
        mark(client, run, why)
        did = "cancelled" if run.state.is_cancelling() else "crashed"
        yield Action(run_id=str(run.id), name=run.name, did=did, why=why)


def mark(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Give a run whose process is dead the state that says so."""
    cancelling = run.state is not None and run.state.is_cancelling()
    say: Any = Cancelled if cancelling else Crashed
    client.set_flow_run_state(run.id, say(message=f"Marked: {why}"), force=True)


def _death(client: SyncPrefectClient, run: FlowRun, moment: datetime) -> str | None:
    """Why a run is held for dead; None while it may live."""
    try:
        record = journal.read(str(run.id))
        alive = journal.is_alive(record)
    except NotFound:
        alive = None
    else:
        began = datetime.fromisoformat(record.started_at)
        if alive is False and run.state and began > run.state.timestamp - CLOCKS_DIFFER:
            return f"its process {record.pid} is gone"  # otherwise a later attempt may be starting
    if alive:
        return None
    silence = (moment - _last_sign(client, run)).total_seconds()
    return f"no sign of life for {silence:.0f} s" if silence > SILENCE_SECONDS else None


def _last_sign(client: SyncPrefectClient, run: FlowRun) -> datetime:
    """When the run was last heard of: its latest heartbeat, or its last change of state."""
    resource = {"id": [f"prefect.flow-run.{run.id}"]}
    asked = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource, "order": "DESC"}
    found = client._client.post("/events/filter", json={"filter": asked, "limit": 1}).json().get("events", [])
    changed = run.state.timestamp if run.state else run.created
    times = [datetime.fromisoformat(event["occurred"]) for event in found]
    return max([*times, *([changed] if changed else [])], default=datetime.min.replace(tzinfo=UTC))


def _resume_crashed(client: SyncPrefectClient, moment: datetime) -> Iterator[Action]:
    for run in _runs(client, StateType.CRASHED):
        crashed_at = run.state.timestamp if run.state else None
        if run.deployment_id is None or crashed_at is None or run.run_count >= MOST_ATTEMPTS:
            continue
        if not RESUME_AFTER < moment - crashed_at < RESUME_WITHIN or _still_ends(run):
            continue
        schedule_again(client, run, f"attempt {run.run_count + 1} of at most {MOST_ATTEMPTS}")
        yield Action(run_id=str(run.id), name=run.name, did="resumed", why=run.state.message or "" if run.state else "")


def _still_ends(run: FlowRun) -> bool:
    """Whether the crashed process is still there, saving its work."""
    try:
        return bool(journal.is_alive(journal.read(str(run.id))))
    except NotFound:
        return False


def schedule_again(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Let a worker take the run up again; its finished stages are cached."""
    client.set_flow_run_state(run.id, Scheduled(name="Resuming", message=f"Goes on: {why}"), force=True)


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
                schedule_again(client, run, "asked for by `align resume`")
            return run_id
        parameters = {**run.parameters, "from_stage": from_stage}
        return str(client.create_flow_run_from_deployment(run.deployment_id, parameters=parameters).id)


def _runs(client: SyncPrefectClient, *types: StateType) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=StateTypes(any_=list(types)))),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )


def main() -> int:
    """Entry point: look, act, say what was done, wait; for ever."""
    suspects: Suspects = {}
    while True:
        try:
            with get_client(sync_client=True) as client:
                while True:
                    for action in reconcile(client, suspects):
                        say(f"{action.name}: {action.did}: {action.why}")
                    time.sleep(EVERY_SECONDS)
        except (prefect.exceptions.PrefectException, OSError, RuntimeError) as error:
            say(f"the server does not answer: {error}")
            time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
