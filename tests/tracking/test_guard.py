"""A failing tracker never affects the run: it never raises into the run, never delays it, and is reported once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from alignment_core.tracking import Listener, Progress, guard, listening
from tests.tracking.watched import result

HALF = Progress(5, 10, "steps", {"loss": 0.5})


class Recorder(Listener):
    """A tracker that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def started(self, label: str) -> None:
        self.events.append(("started", label))

    def progress(self, label: str, progress: Progress) -> None:
        self.events.append(("progress", progress.done))

    def finished(self, result: Any) -> None:
        self.events.append(("finished", result.label))

    def ended(self, completed: bool) -> None:
        self.events.append(("ended", completed))


class Broken(Recorder):
    def progress(self, label: str, progress: Progress) -> None:
        raise SystemExit("no network")


class Stuck(Recorder):
    """It hangs in its first progress, until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.released = threading.Event(), threading.Event()

    def progress(self, label: str, progress: Progress) -> None:
        self.hangs.set()
        self.released.wait(600)
        super().progress(label, progress)


def run(listeners: Any) -> None:
    for listener in listeners:
        listener.started("sft")
        listener.progress("sft", HALF)
        listener.progress("sft", HALF)
        listener.finished(result("sft"))


WHOLE = [("started", "sft"), ("progress", 5), ("progress", 5), ("finished", "sft"), ("ended", True)]


def test_a_tracker_receives_a_stage_from_its_start_to_the_end_of_the_run() -> None:
    recorder, warnings = Recorder(), []
    with listening({"one": lambda: recorder}, warnings.append) as listeners:
        run(listeners)
    assert recorder.events == WHOLE
    assert warnings == []


def test_trackers_receive_the_end_of_a_failed_run_and_its_error_propagates() -> None:
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt), listening({"one": lambda: recorder}, print):
        raise KeyboardInterrupt
    assert recorder.events == [("ended", False)]


def test_a_failing_tracker_is_reported_once_and_disabled_while_others_receive_all_events() -> None:
    broken, recorder, warnings = Broken(), Recorder(), []
    with listening({"W&B": lambda: broken, "other": lambda: recorder}, warnings.append) as listeners:
        run(listeners)
    assert warnings == ["W&B: no network; it gets no further updates of this run"]
    assert broken.events == [("started", "sft")]
    assert recorder.events == WHOLE


def test_a_tracker_that_cannot_be_opened_is_reported_by_the_type_of_an_error_without_text() -> None:
    def opening() -> Any:
        raise MemoryError

    warnings: list[str] = []
    with listening({"W&B": opening}, warnings.append) as listeners:
        run(listeners)
    assert warnings == ["W&B: MemoryError; it gets no further updates of this run"]


def test_a_failing_warning_does_not_fail_the_run() -> None:
    def warn(sentence: str) -> None:
        raise BrokenPipeError(sentence)

    with listening({"one": Broken}, warn) as listeners:
        run(listeners)


def test_a_tracker_that_hangs_holds_up_neither_the_stages_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CLOSE_SECONDS", 0.2)
    stuck, recorder, warnings = Stuck(), Recorder(), []
    began = time.monotonic()
    with listening({"stuck": lambda: stuck, "other": lambda: recorder}, warnings.append) as listeners:
        run(listeners)
    assert time.monotonic() - began < 300, "it did not wait for the hanging tracker"
    stuck.released.set()
    assert warnings == ["stuck: does not finish; the run continues without it"]
    assert recorder.events == WHOLE


def test_a_tracker_that_does_not_keep_up_misses_progress_but_no_beginning_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MOST_WAITING", 10)
    stuck, warnings = Stuck(), []
    with listening({"slow": lambda: stuck}, warnings.append) as (listener,):
        listener.progress("sft", HALF)
        assert stuck.hangs.wait(30)
        for _ in range(1000):
            listener.progress("sft", HALF)
        listener.finished(result("sft"))
        stuck.released.set()
    assert stuck.events == [*[("progress", 5)] * 11, ("finished", "sft"), ("ended", True)]
    assert warnings == []


def test_every_event_is_passed_on() -> None:
    """A guard without such a method would drop the event: it inherits one that does nothing."""
    events = {name for name in vars(Listener) if not name.startswith("_")}
    assert events <= vars(guard.Guarded).keys()
