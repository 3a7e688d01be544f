"""TensorBoard: one folder of event files per stage, so that curves of several stages are drawn in one chart."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.execution.base import StageResult
from alignment_core.execution.curve import Line
from alignment_core.printable import printable
from alignment_core.tracking.listener import Listener, Progress, numbers

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_SECONDS = 5


class TensorBoard(Listener):
    """A listener that writes below ``folder``. Reported metrics are curves; a stage's result is a point ``result/…``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, EventFileWriter] = {}
        self._last: dict[str, int] = {}

    def started(self, label: str) -> None:
        self._last.pop(label, None)

    def progress(self, label: str, progress: Progress) -> None:
        step, last = round(progress.done), self._last.get(label)
        if last is None or step < last:
            self._forget_from(label, step if progress.metrics else step + 1)
        elif step == last and not progress.metrics:
            self._forget_from(label, step + 1)
        self._last[label] = step
        if progress.metrics:
            self._write(label, step, dict(numbers(progress.metrics)))

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        self._forget_from(label, round(lines[0]["step"]))
        for line in lines:
            self._last[label] = round(line["step"])
            self._write(label, self._last[label], dict(numbers(line["metrics"])))

    def finished(self, result: StageResult) -> None:
        values = {f"result/{name}": value for name, value in numbers(result.metrics)}
        if values:
            self._write(result.label, 0, values)
        if writer := self._writers.pop(result.label, None):
            writer.close()

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table below the tab Text."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        text = TensorProto(dtype=DT_STRING, string_val=[_table(rows).encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=title, metadata=metadata, tensor=text)
        self._writer(".").add_event(Event(step=0, wall_time=time.time(), summary=Summary(value=[value])))

    def ended(self, completed: bool) -> None:
        for writer in self._writers.values():
            writer.close()

    def _forget_from(self, label: str, step: int) -> None:
        """Begin or resume a stage: TensorBoard discards its points from ``step`` on."""
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


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with all special characters escaped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([_cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return html.escape(printable(str(value))).replace("|", "&#124;").replace("\n", "<br>")
