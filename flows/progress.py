"""Progress bars of stages on the run's page in the Prefect UI."""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from alignment_core.execution.base import StageResult
from alignment_core.tracking import Listener, Progress

AFTER_SECONDS = 3.0
EVERY_SECONDS = 5.0


@dataclass
class _Shown:
    since: float
    artifact: UUID | None = None
    updated: float = 0.0


class ProgressArtifacts(Listener):
    """One progress artifact for each running stage that takes longer than ``AFTER_SECONDS``.

    It needs the id of the run, because Prefect's context does not reach a tracker's thread. The artifacts have no keys: see
    ``_show_page`` in ``run_page.py``.
    """

    def __init__(self, flow_run: UUID) -> None:
        self.flow_run = flow_run
        self._stages: dict[str, _Shown] = {}

    def started(self, label: str) -> None:
        before = self._stages.get(label)  # a retried stage keeps its bar
        self._stages[label] = _Shown(time.monotonic(), before.artifact if before else None)

    def progress(self, label: str, progress: Progress) -> None:
        stage, now = self._stages.get(label), time.monotonic()
        if stage and progress.total and now - stage.since >= AFTER_SECONDS and now - stage.updated >= EVERY_SECONDS:
            stage.updated = now
            self._show(label, stage, 100 * min(1.0, progress.done / progress.total))

    def failed(self, label: str, sentence: str) -> None:
        self._delete(label)

    def finished(self, result: StageResult) -> None:
        self._delete(result.label)

    def ended(self, completed: bool) -> None:
        for label in list(self._stages):
            self._delete(label)

    def _delete(self, label: str) -> None:
        """Delete the bar of a stage that ended: the run's report says how far it came."""
        stage = self._stages.pop(label, None)
        if stage and stage.artifact:
            with get_client(sync_client=True) as client:
                client.delete_artifact(stage.artifact)

    def _show(self, label: str, stage: _Shown, percent: float) -> None:
        with get_client(sync_client=True) as client:
            if stage.artifact:
                client.update_artifact(stage.artifact, ArtifactUpdate(data=percent))
            else:
                new = ArtifactCreate(type="progress", description=label, data=percent, flow_run_id=self.flow_run)
                stage.artifact = client.create_artifact(new).id
