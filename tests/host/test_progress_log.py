"""Progress of a stage in words: frequent at first and then rarer."""

from __future__ import annotations

import pytest

from alignment_core.host.progress_log import Pace, duration, headline, number
from alignment_core.tracking import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_are_due_at_2_4_8_16_32_seconds_and_then_every_30(clock):
    pace, due = Pace(clock), []
    for tenth in range(1600):
        clock.now = 100 + tenth / 10
        pace.seen(Progress(tenth, None, "steps", {}))
        if pace.due():
            due.append(tenth / 10)
    assert due == [2, 4, 8, 16, 32, 62, 92, 122, 152]


def test_lines_about_a_silent_stage_are_due_every_ten_seconds_except_during_waits(clock):
    silent, waiting, due = Pace(clock), Pace(clock), {"silent": [], "waiting": []}
    for second in range(70):
        clock.now = 100 + second
        if silent.due():
            due["silent"].append(second)
        if waiting.due(waits=True):
            due["waiting"].append(second)
    assert due == {"silent": [2, 4, 8, 16, 26, 36, 46, 56, 66], "waiting": [2, 4, 8, 16, 32, 62]}


def test_a_line_has_progress_key_metrics_rate_and_remaining_time(clock):
    pace = Pace(clock)
    assert pace.line() == "runs for 0 s"
    shows = {"reward": "reward", "kl": "KL", "completion_length": "length"}
    pace.seen(Progress(0, 40, "steps", {}, shows))
    clock.now += 20
    metrics = {"reward": 0.125, "loss": -0.0, "completion_length": 14.0, "tokens_per_second": 1234.5}
    pace.seen(Progress(10, 40, "steps", metrics, shows))
    assert pace.line() == "10/40 steps · reward 0.125 · length 14.000 · 2 s per step · 1,234 tokens/s · 1 min 0 s left"


def test_another_unit_has_its_own_rate(clock):
    pace = Pace(clock)
    pace.seen(Progress(0, 10, "blocks", {}))
    clock.now += 10
    pace.seen(Progress(10, 10, "blocks", {}))
    pace.seen(Progress(0, 100, "steps", {}))
    assert (pace.rate, pace.seconds_left) == (None, None)
    clock.now += 10
    pace.seen(Progress(50, 100, "steps", {}))
    assert (pace.rate, pace.seconds_left) == (5.0, 10.0)
    pace.seen(Progress(20, 100, "steps", {}))  # it resumes from a checkpoint
    assert pace.rate is None


def test_key_metrics_are_shown_from_first_to_last_value():
    shows = {"reward": "reward", "kl": "KL"}
    assert headline(shows, {"loss": 1.0, "kl": 0.012, "reward": 0.83, "reward.first": 0.12}) == (
        "reward 0.120 → 0.830 · KL 0.012"
    )
    assert headline(shows, {"loss": 1.0}) == ""
    assert headline({"rows": "train rows"}, {"rows": "288 of 400: 62 too_long, 50 test"}) == (
        "train rows 288 of 400: 62 too_long, 50 test"
    )


def test_numbers_and_durations_are_short():
    assert [number(value) for value in (12, 12345, 0.0001234, -0.0, 0.5, 2048.0)] == [
        "12",
        "12,345",
        "0.00012",
        "0.000",
        "0.500",
        "2,048",
    ]
    assert [duration(seconds) for seconds in (0.4, 59.6, 3700)] == ["0 s", "1 min 0 s", "1 h 1 min"]
