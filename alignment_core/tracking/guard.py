"""The one place where a tracker may fail, hang or be slow, so that none of it reaches the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from alignment_core.execution.base import StageResult
from alignment_core.execution.curve import Line
from alignment_core.tracking.listener import Listener, Progress

MOST_WAITING = 1000
"""Events in the queue of a tracker that does not keep up; beyond this it is told of no more progress."""
CLOSE_SECONDS = 15.0
"""What all trackers together may take once the run is over."""

Trackers = Mapping[str, Callable[[], Listener]]
"""How to open each tracker, by the name that people know it by."""
Warn = Callable[[str], None]


@contextmanager
def listening(trackers: Trackers, warn: Warn) -> Iterator[tuple[Listener, ...]]:
    """Open trackers and yield listeners that never raise and never wait; tell the trackers at the end how the run ended.

    ``warn`` gets one sentence for each tracker that fails, which is then told no more.
    """
    guarded = tuple(Guarded(name, opening, warn) for name, opening in trackers.items())
    completed = False
    try:
        yield guarded
        completed = True
    finally:
        for one in guarded:
            one.ended(completed)
        deadline = time.monotonic() + CLOSE_SECONDS
        for one in guarded:
            one.join(deadline)


class Guarded(Listener):
    """A listener that passes each event on to a tracker in a thread of the tracker's own."""

    def __init__(self, name: str, opening: Callable[[], Listener], warn: Warn) -> None:
        self.name, self._opening, self._warn = name, opening, warn
        self._events: SimpleQueue[Callable[[Listener], None] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def started(self, label: str) -> None:
        self._tell(lambda tracker: tracker.started(label))

    def progress(self, label: str, progress: Progress) -> None:
        if self._events.qsize() < MOST_WAITING:
            self._tell(lambda tracker: tracker.progress(label, progress))

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        self._tell(lambda tracker: tracker.resumed(label, lines))

    def waits(self, label: str, reason: str | None) -> None:
        self._tell(lambda tracker: tracker.waits(label, reason))

    def starts(self, label: str, what: str | None) -> None:
        self._tell(lambda tracker: tracker.starts(label, what))

    def warned(self, label: str, sentence: str) -> None:
        self._tell(lambda tracker: tracker.warned(label, sentence))

    def failed(self, label: str, sentence: str) -> None:
        self._tell(lambda tracker: tracker.failed(label, sentence))

    def finished(self, result: StageResult) -> None:
        self._tell(lambda tracker: tracker.finished(result))

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tell(lambda tracker: tracker.texts(title, rows))

    def ended(self, completed: bool) -> None:
        self._tell(lambda tracker: tracker.ended(completed))
        self._events.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the tracker has heard everything, or until ``deadline`` (of the monotonic clock)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._say("does not finish; the run continues without it")

    def _tell(self, event: Callable[[Listener], None]) -> None:
        if not self._failed:
            self._events.put(event)

    def _work(self) -> None:
        try:
            tracker = self._opening()
            for event in iter(self._events.get, None):
                event(tracker)
        except BaseException as error:  # SystemExit, too, would otherwise end the thread without a word
            self._failed = True
            self._say(f"{str(error) or type(error).__name__}; it gets no further updates of this run")

    def _say(self, sentence: str) -> None:
        with contextlib.suppress(Exception):
            self._warn(f"{self.name}: {sentence}")
