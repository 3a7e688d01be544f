"""Isolates trackers: one that fails, hangs or is slow does not affect the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.curve import Line
from alignment_core.tracking.listener import Listener, Progress

MOST_WAITING = 1000
"""Queued events of a slow tracker, beyond which it misses progress updates."""
CLOSE_SECONDS = 15.0
"""Time limit for all trackers together after the end of the run."""

Trackers = Mapping[str, Callable[[], Listener]]
"""Functions that open the trackers, by their display names."""
Warn = Callable[[str], None]


@contextmanager
def listening(trackers: Trackers, warn: Warn) -> Iterator[tuple[Listener, ...]]:
    """Open trackers and yield listeners that never raise and never block; on exit they get the outcome of the run.

    ``warn`` gets one sentence for each tracker that fails, which then receives no further events.
    """
    guarded = tuple(Guarded(name, opening, warn) for name, opening in trackers.items())
    completed = False
    try:
        yield guarded
        completed = True
    finally:
        for listener in guarded:
            listener.ended(completed)
        deadline = time.monotonic() + CLOSE_SECONDS
        for listener in guarded:
            listener.join(deadline)


class Guarded(Listener):
    """A listener that passes events to a tracker in a separate thread."""

    def __init__(self, name: str, opening: Callable[[], Listener], warn: Warn) -> None:
        self.name = name
        self._opening = opening
        self._warn = warn
        self._events: SimpleQueue[Callable[[Listener], None] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def requested(self, call: StageCall, key: str) -> None:
        self._send(lambda tracker: tracker.requested(call, key))

    def started(self, label: str) -> None:
        self._send(lambda tracker: tracker.started(label))

    def progress(self, label: str, progress: Progress) -> None:
        if self._events.qsize() < MOST_WAITING:
            self._send(lambda tracker: tracker.progress(label, progress))

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        self._send(lambda tracker: tracker.resumed(label, lines))

    def waits(self, label: str, reason: str | None) -> None:
        self._send(lambda tracker: tracker.waits(label, reason))

    def starts(self, label: str, component: str | None) -> None:
        self._send(lambda tracker: tracker.starts(label, component))

    def warned(self, label: str, sentence: str) -> None:
        self._send(lambda tracker: tracker.warned(label, sentence))

    def produced(self, result: StageResult) -> None:
        self._send(lambda tracker: tracker.produced(result))

    def raised(self, label: str, error: BaseException) -> None:
        self._send(lambda tracker: tracker.raised(label, error))

    def failed(self, label: str, sentence: str) -> None:
        self._send(lambda tracker: tracker.failed(label, sentence))

    def finished(self, result: StageResult) -> None:
        self._send(lambda tracker: tracker.finished(result))

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._send(lambda tracker: tracker.texts(title, rows))

    def ended(self, completed: bool) -> None:
        self._send(lambda tracker: tracker.ended(completed))
        self._events.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the tracker has handled all events, or until ``deadline`` (of the monotonic clock)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn_about("does not finish; the run continues without it")

    def _send(self, event: Callable[[Listener], None]) -> None:
        if not self._failed:
            self._events.put(event)

    def _work(self) -> None:
        try:
            tracker = self._opening()
            for event in iter(self._events.get, None):
                event(tracker)
        except BaseException as error:  # SystemExit included, which would otherwise end the thread silently
            self._failed = True
            self._warn_about(f"{str(error) or type(error).__name__}; it gets no further updates of this run")

    def _warn_about(self, sentence: str) -> None:
        with contextlib.suppress(Exception):
            self._warn(f"{self.name}: {sentence}")
