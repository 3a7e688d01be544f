"""Clean the run's page after an attempt whose process died: open task runs and progress bars."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.states import Crashed

from alignment.tasks.stage import SubmittedStage

OPEN = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]
PAGE = 200


def clear_page(client: SyncPrefectClient, flow_run: UUID, why: str) -> None:
    """Close the task runs of a run whose process is dead, or has not begun yet, and delete its progress bars."""
    close_task_runs(client, flow_run, why)
    bars = ArtifactFilter.model_validate({"flow_run_id": {"any_": [flow_run]}, "type": {"any_": ["progress"]}})
    for bar in client.read_artifacts(artifact_filter=bars):
        client.delete_artifact(bar.id)


SKIPPED = "Skipped"
"""State of the task of a stage that did not begin."""
TASK_LOG = logging.getLogger("prefect.task_runs")


def _began(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Finished in state NotReady")


def log_no_task_that_did_not_begin() -> None:
    """Drop Prefect's log line for each task that waits for a failed one: it has only their ids."""
    TASK_LOG.addFilter(_began)


def close_not_begun(client: SyncPrefectClient, steps: Sequence[SubmittedStage]) -> list[str]:
    """Give stages that did not begin their names and a final state on the run's page; returns their labels.

    Prefect's own state for them, NotReady, is of the type Pending, so the page would show them as waiting for ever. Prefect
    names a task only when it begins.
    """
    labels = {str(step.future.task_run_id): step.label for step in steps}
    skipped = []
    for step in steps:
        state = step.future.state
        if state.is_pending():
            needed = next((label for task, label in labels.items() if task in (state.message or "")), None)
            message = f"{needed} did not complete" if needed else "the run ended before it began"
            client.set_task_run_name(step.future.task_run_id, step.label)
            final = State(type=StateType.CANCELLED, name=SKIPPED, message=message)
            client.set_task_run_state(step.future.task_run_id, final, force=True)
            skipped.append(step.label)
    return skipped


def close_task_runs(client: SyncPrefectClient, flow_run: UUID, why: str) -> int:
    """Mark the open task runs of a run whose process is dead, or has not begun yet, as crashed; returns their number."""
    closed = 0
    while True:
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run]}}),
            task_run_filter=TaskRunFilter.model_validate({"state": {"type": {"any_": OPEN}, "name": None}}),
            limit=PAGE,
        )
        for task_run in task_runs:
            client.set_task_run_state(task_run.id, Crashed(message=why), force=True)
        closed += len(task_runs)
        if len(task_runs) < PAGE:
            return closed
