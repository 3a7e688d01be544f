"""Cleaning up what an attempt left on the run's page when its process died: running or pending task runs, and bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.futures import PrefectFuture
from prefect.states import Crashed

OPEN = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]
PAGE = 200


def clear_page(client: SyncPrefectClient, flow_run: UUID, why: str) -> None:
    """Close the task runs of a run whose process is dead, or has not begun yet, and take its progress away."""
    close_task_runs(client, flow_run, why)
    bars = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]), type=ArtifactFilterType(any_=["progress"])
    )
    for bar in client.read_artifacts(artifact_filter=bars):
        client.delete_artifact(bar.id)


def close_not_begun(client: SyncPrefectClient, futures: Iterable[PrefectFuture[Any]]) -> None:
    """Give the tasks of a run that ends a final state that could not begin, because what they need did not complete.

    Prefect's own state for them, NotReady, is one of type Pending: the page would show them as waiting for ever.
    """
    for future in futures:
        state = future.state
        if state.is_pending():
            final = State(type=StateType.CANCELLED, name=state.name, message=state.message)
            client.set_task_run_state(future.task_run_id, final, force=True)


def close_task_runs(client: SyncPrefectClient, flow_run: UUID, why: str) -> int:
    """Mark the open task runs of a run whose process is dead, or has not begun yet, as crashed; how many they were."""
    closed = 0
    while True:
        left = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN), name=None)),
            limit=PAGE,
        )
        for task_run in left:
            client.set_task_run_state(task_run.id, Crashed(message=why), force=True)
        closed += len(left)
        if len(left) < PAGE:
            return closed
