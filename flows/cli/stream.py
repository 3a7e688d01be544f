"""The events of a run: lines of text without a terminal, JSON objects with ``--json``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from alignment_core.execution.base import StageResult, load_stage
from alignment_core.host.progress_log import MOST_SECONDS, Clock, Pace, headline
from alignment_core.journal import short_id
from alignment_core.tracking import Listener, Progress

TICK_SECONDS = 0.5
Event = dict[str, Any]


class EventStream(Listener):
    """A listener that emits events, and at growing intervals the progress of each stage; to be used as a context manager.

    ``emit`` gets each event as plain data, one at a time; ``text`` is the event as a line.
    """

    def __init__(self, emit: Callable[[Event], None], clock: Clock = time.monotonic) -> None:
        self._emit = emit
        self._clock = clock
        self._lock = threading.RLock()
        self._stages: dict[str, Pace] = {}
        self._waiting: dict[str, str] = {}
        self._over = threading.Event()
        self._has_reader = True
        self._thread = threading.Thread(target=self._loop, daemon=True, name="event stream")

    def __enter__(self) -> EventStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def opened(self, run_id: str, name: str, folder: str, log: str) -> None:
        """The run has an id, a folder for its journal and metrics, and a log."""
        text = f"{name} (run {short_id(run_id)}): metrics in {folder}, log {log}"
        self._emit_event("run_started", text, run_id=run_id, name=name, folder=folder, log=log)

    def started(self, label: str) -> None:
        with self._lock:
            self._stages[label] = Pace(self._clock)
        self._emit_event("stage_started", f"{label}: starts", stage=label)

    def progress(self, label: str, progress: Progress) -> None:
        with self._lock:
            if pace := self._stages.get(label):
                pace.seen(progress)

    def waits(self, label: str, reason: str | None) -> None:
        with self._lock:
            if reason:
                self._waiting[label] = reason
            else:
                self._waiting.pop(label, None)
        self._emit_event(
            "waits", f"{label}: waits for {reason}" if reason else f"{label}: continues", stage=label, reason=reason
        )

    def starts(self, label: str, what: str | None) -> None:
        with self._lock:
            if pace := self._stages.get(label):
                pace.starts(what)

    def warned(self, label: str, sentence: str) -> None:
        self.warn(f"{label}: {sentence}", stage=label)

    def failed(self, label: str, sentence: str) -> None:
        self._forget(label)
        self.warned(label, sentence)

    def _forget(self, label: str) -> None:
        with self._lock:
            self._stages.pop(label, None)
            self._waiting.pop(label, None)

    def finished(self, result: StageResult) -> None:
        self._forget(result.label)
        done = result.times if result.state == "run" else "cached"
        shown = headline(load_stage(result.stage).shows, result.metrics)
        text = " · ".join(part for part in (f"{result.label}: done, {done}", shown, result.reason) if part)
        self._emit_event("stage_finished", text, **result.model_dump(mode="json"))
        for sentence in result.warnings:
            self.warn(f"{result.label}: {sentence}", stage=result.label)

    def left(self, report: str) -> None:
        """The run ends before it is complete; ``report`` is the path of its report."""
        self._emit_event("report", f"report so far: {report}", report=report)

    def warn(self, sentence: str, **more: Any) -> None:
        """Emit a warning."""
        self._emit_event("warning", f"warning: {sentence}", **more, sentence=sentence)

    def tick(self) -> None:
        """Emit the progress of each stage whose line is due; called by the stream's thread.

        A waiting stage has had an event when it began to wait, so its lines are rarer.
        """
        with self._lock:
            due = [(label, pace) for label, pace in self._stages.items() if pace.due(label in self._waiting)]
            due = [(label, pace) for label, pace in due if label not in self._waiting or pace.seconds > MOST_SECONDS]
            for label, pace in due:
                waits = f" · waits for {self._waiting[label]}" if label in self._waiting else ""
                self._emit_event("progress", f"{label}: {pace.line()}{waits}", stage=label, **_numbers(pace))

    def _loop(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            self.tick()

    def _emit_event(self, event: str, text: str, **content: Any) -> None:
        with self._lock:
            if self._has_reader:
                try:
                    self._emit({"event": event, "text": text, **content})
                except OSError:  # `align run … | head`: the reader has gone, and the run continues
                    self._has_reader = False


def _numbers(pace: Pace) -> Event:
    """The progress of a stage in numbers."""
    progress, counts = pace.progress, {}
    if progress is not None:
        counts = {
            "done": progress.done,
            "total": progress.total,
            "unit": progress.unit,
            "metrics": dict(progress.metrics),
        }
    return {"seconds": round(pace.seconds, 1), "rate": pace.rate, "seconds_left": pace.seconds_left, **counts}
