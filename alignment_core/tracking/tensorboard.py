"""TensorBoard: one folder of event files per stage, so that the same curves of several stages lie over each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.stages.base import StageResult
from alignment_core.tracking.listener import Progress, numbers

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_SECONDS = 5


class TensorBoard:
    """A listener that writes below ``folder``. What a stage reports is a curve; its result is a point ``result/…``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, EventFileWriter] = {}
        self._last: dict[str, int] = {}

    def started(self, label: str) -> None:
        self._last.pop(label, None)

    def progress(self, label: str, progress: Progress) -> None:
        step = round(progress.done)
        if step <= self._last.get(label, step):
            self._forget_from(label, step if progress.metrics else step + 1)
        self._last[label] = step
        if progress.metrics:
            self._write(label, step, dict(numbers(progress.metrics)))

    def waits(self, label: str, reason: str | None) -> None: ...

    def finished(self, result: StageResult) -> None:
        values = {f"result/{name}": value for name, value in numbers(result.metrics)}
        if values:
            self._write(result.label, 0, values)
        if writer := self._writers.pop(result.label, None):
            writer.close()

    def ended(self, completed: bool) -> None:
        for writer in self._writers.values():
            writer.close()

    def _forget_from(self, label: str, step: int) -> None:
        """A stage that begins, or goes on from its last checkpoint: what was drawn beyond that goes."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer(label).add_event(Event(step=step, wall_time=time.time(), session_log=start))

    def _write(self, label: str, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer(label).add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=points)))

    def _writer(self, label: str) -> EventFileWriter:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if label not in self._writers:
            self._writers[label] = EventFileWriter(str(self.folder / label), flush_secs=FLUSH_SECONDS)
        return self._writers[label]
