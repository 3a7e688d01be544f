"""The deadlines of a stage: lack of progress, and its whole time. The clock and the host's messages are the test's own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.errors import DeadlineExceeded, InfrastructureError
from alignment_core.execution.base import StageCall
from alignment_core.heartbeat import beat, beating, listening
from alignment_core.host import client
from alignment_core.host.client import Host
from alignment_core.recipes import ResourcesConfig

PROGRESS = {"event": "progress", "done": 1, "total": 9, "unit": "steps", "metrics": {}}
HEARTBEAT = {"event": "heartbeat"}
STARTS = {"event": "starts", "what": "the trainers"}
WAITS, READY = {"event": "waits", "for": "the trainers"}, {"event": "waits", "for": None}
END = {"event": "died"}
"""The stage has come to its end without a deadline: here by the death of its host, which needs no result."""

Messages = list[tuple[float, dict[str, Any]]]
"""Messages of the host, each with the seconds since the one before."""


class Silence(Exception):
    """A wait without a deadline for a message that never comes."""


def end_of(
    messages: Messages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **resources: float
) -> tuple[str, float]:
    """The error of a stage with these messages, and the time at which it came."""
    now, coming = 1000.0, iter(messages)

    class Answers:
        def get(self, timeout: float | None) -> dict[str, Any]:
            nonlocal now
            seconds, message = next(coming, (float("inf"), END))
            if timeout is None and seconds == float("inf"):
                raise Silence
            if timeout is not None and seconds > timeout:
                now += timeout
                raise queue.Empty
            now += seconds
            return message

    @contextmanager
    def request(_: Any) -> Iterator[Answers]:
        yield Answers()

    session = SimpleNamespace(
        request=request, close=lambda: None, host=SimpleNamespace(process=SimpleNamespace(returncode=1))
    )
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    host = Host("store", ResourcesConfig(**resources), tmp_path / "host.log")  # type: ignore[arg-type]
    monkeypatch.setattr(host, "_live_session", lambda: session)
    host._session = session  # type: ignore[assignment]
    with pytest.raises(InfrastructureError) as caught:
        host.run(StageCall(stage="sft", label="sft", config={}, inputs={}))
    assert isinstance(caught.value, DeadlineExceeded) == ("resources." in str(caught.value))
    assert host._session is None, "what may hang is ended"
    return str(caught.value), now - 1000.0


NO_PROGRESS = "sft made no progress for 60 seconds (resources.no_progress_timeout_seconds)"


@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        ([], 60),
        ([(59, PROGRESS), (59, PROGRESS)], 2 * 59 + 60),
        ([(50, STARTS), (50, HEARTBEAT), (50, {"event": "resumed", "lines": []})], 3 * 50 + 60),
        ([(50, {"event": "warning", "sentence": "restart 1 of 3"})], 50 + 60),
        ([(50, WAITS), (5000, READY)], 50 + 5000 + 60),
        ([(50, WAITS), (5000, WAITS), (5000, READY), (59, HEARTBEAT)], 50 + 10000 + 59 + 60),
    ],
)
def test_a_stage_without_progress_is_ended(
    messages: Messages, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert end_of(messages, monkeypatch, tmp_path, no_progress_timeout_seconds=60) == (NO_PROGRESS, seconds)


def test_a_long_stage_with_progress_is_not_ended_and_its_waits_have_no_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    week = 7 * 24 * 3600
    messages: Messages = [(3600, PROGRESS)] * (week // 3600)
    sentence, seconds = end_of([*messages, (1, END)], monkeypatch, tmp_path)
    assert sentence.startswith("sft: the run host died")
    assert seconds == week + 1
    with pytest.raises(Silence):
        end_of([(1, WAITS)], monkeypatch, tmp_path)


def test_by_default_the_limit_is_twice_that_of_a_single_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sentence, seconds = end_of([], monkeypatch, tmp_path, wait_timeout_seconds=20000)
    assert sentence == "sft made no progress for 40000 seconds (resources.no_progress_timeout_seconds)"
    assert seconds == 40000


def test_the_whole_time_of_a_stage_may_be_limited_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stored recipes of versions with this limit alone have 86400 here."""
    limits = {"stage_timeout_seconds": 200.0, "no_progress_timeout_seconds": 60.0}
    says = "sft took longer than its 200 seconds (resources.stage_timeout_seconds)"
    assert end_of([(50, PROGRESS)] * 9, monkeypatch, tmp_path, **limits) == (says, 200)
    waited: Messages = [(50, PROGRESS), (0, WAITS), (1000, READY), *[(50, PROGRESS)] * 9]
    assert end_of(waited, monkeypatch, tmp_path, **limits) == (says, 1200)
    assert end_of([(50, PROGRESS)], monkeypatch, tmp_path, **limits) == (NO_PROGRESS, 110)
    assert ResourcesConfig.model_validate({"stage_timeout_seconds": 86400.0}).stage_timeout_seconds == 86400


def test_heartbeats_reach_the_listener_of_their_thread() -> None:
    beats: list[str] = []
    beat()
    with listening(lambda: beats.append("outer")):
        with listening(lambda: beats.append("inner")):
            beat()
        assert [*beating("ab")] == ["a", "b"]
    beat()
    assert beats == ["inner", "outer", "outer"]
