"""How often a training stage saves its progress."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.execution import save_schedule
from alignment_core.execution.base import StageContext
from alignment_core.execution.save_schedule import SaveSchedule, pause_after
from alignment_core.recipes import ResourcesConfig


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save_schedule, "time", clock)
    return clock


def context(progress: Path, told: list[Any], **resources: Any) -> StageContext:
    context = StageContext.__new__(StageContext)
    config = ResourcesConfig(**resources)
    context.__dict__.update(progress=progress, resources=config, cost={}, saved=lambda *told_now: told.append(told_now))
    return context


def train(schedule: SaveSchedule, clock: Clock, save_seconds: float, hours: float) -> tuple[int, float]:
    """Steps of a second; the number of saves, and the longest time between the end of one and the begin of the next."""
    end = clock.now + hours * 3600
    saves, longest, last = 0, 0.0, clock.now
    while clock.now < end:
        clock.now += 1.0
        if schedule.is_due:
            longest = max(longest, clock.now - last)
            with schedule.saving():
                clock.now += save_seconds
            last = clock.now
            saves += 1
    return saves, longest


@pytest.mark.parametrize(
    ("save_seconds", "pause"),
    [(0.1, 60.0), (3.0, 60.0), (10.0, 200.0), (45.0, 900.0), (600.0, 12000.0)],
)
def test_saves_take_less_than_five_percent_of_the_time(
    save_seconds: float, pause: float, clock: Clock, tmp_path: Path
) -> None:
    """A save of 10 s after 200 s is 4.8 % of 210 s."""
    assert pause_after(save_seconds) == pytest.approx(pause)
    schedule = SaveSchedule(context(tmp_path, []))
    saves, longest = train(schedule, clock, save_seconds, hours=10)
    assert longest == pytest.approx(pause, abs=1.5)
    assert saves * save_seconds / 36_000 <= 0.05


def test_a_given_interval_holds_however_long_saving_takes(clock: Clock, tmp_path: Path) -> None:
    schedule = SaveSchedule(context(tmp_path, [], progress_seconds=5.0))
    assert train(schedule, clock, save_seconds=30.0, hours=0.1)[1] == pytest.approx(5.0, abs=1.5)


def test_a_resumed_stage_knows_how_long_saving_takes(clock: Clock, tmp_path: Path) -> None:
    told: list[Any] = []
    first = context(tmp_path, told)
    train(SaveSchedule(first), clock, save_seconds=30.0, hours=0.1)
    assert first.cost["save_seconds"] == 30.0
    again = SaveSchedule(context(tmp_path, told))
    assert told == [("save", 30.0), ("save", 30.0)]
    clock.now += 599.0
    assert not again.is_due
    clock.now += 2.0
    assert again.is_due


@pytest.mark.parametrize("content", ["", "soon", "[1]", '{"seconds": 1}'])
def test_a_damaged_duration_counts_as_none(content: str, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "save-seconds.json").write_text(content)
    schedule = SaveSchedule(context(tmp_path, []))
    clock.now += 61.0
    assert schedule.is_due


def test_a_failed_save_is_no_measurement(clock: Clock, tmp_path: Path) -> None:
    told: list[Any] = []
    schedule = SaveSchedule(context(tmp_path, told))
    with pytest.raises(OSError, match="no space"), schedule.saving():
        raise OSError("no space")
    assert told == []
    assert not (tmp_path / "save-seconds.json").exists()


def test_a_recipe_of_an_earlier_version_keeps_its_interval() -> None:
    assert ResourcesConfig.model_validate({"progress_seconds": 60.0}).progress_seconds == 60.0
    assert SimpleNamespace(**ResourcesConfig().model_dump()).progress_seconds is None
