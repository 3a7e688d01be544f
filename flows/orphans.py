"""Task runs that an attempt left open when its process died: without this they stay Running or Pending for ever."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

OPEN = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]
PAGE = 200


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
