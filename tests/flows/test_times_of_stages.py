"""The time of a stage: start-up, waiting and work are its whole time, and are the same wherever they are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli.stream import EventStream
from alignment_core import journal
from alignment_core.execution import cost
from alignment_core.execution.cost import Meter, times
from alignment_core.execution.scheduling import START_OF_ACTORS, Ticket
from tests.host.test_progress_log import Clock
from tests.tracking.watched import result


def test_the_parts_of_a_stage_are_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested at 100 s, in its host at 130 s: 30 s of start-up. Then 1 s of work, 4 s of waiting for another stage, 2 s for
    the early start of the actors, 6 s of starting engines with 1 s of waiting within, and 7 s of work."""
    clock = Clock()
    monkeypatch.setattr(cost, "time", type("time", (), {"monotonic": staticmethod(clock)}))
    clock.now = 130.0
    meter = Meter(Ticket(), requested=100.0)
    clock.now = 131.0
    meter.ticket.waits("the trainers, in use by sft")
    clock.now = 135.0
    meter.ticket.waits(f"the trainers, in use by {START_OF_ACTORS}")
    clock.now = 137.0
    meter.ticket.waits(None)
    with meter.ticket.starting("the engines"):
        clock.now = 140.0
        meter.ticket.waits("the GPUs")
        clock.now = 141.0
        meter.ticket.waits(None)
        clock.now = 143.0
    clock.now = 150.0
    measured = meter.cost()
    assert {name: measured[name] for name in cost.PARTS} == {
        "startup_seconds": 30 + 2 + 5,
        "waited_seconds": 4 + 1,
        "seconds": 1 + 7,
    }
    assert times(measured) == "50.0 s (start-up 37.0 s, waiting 5.0 s, work 8.0 s)"


def test_a_negligible_start_up_is_not_shown() -> None:
    assert times({"seconds": 2.0, "startup_seconds": 0.01}) == "2.0 s"


def test_a_silent_stage_names_the_starting_part_every_ten_seconds() -> None:
    clock, lines = Clock(), list[str]()
    stream = EventStream(lambda event: lines.append(event["text"]), clock)
    stream.started("sft")
    stream.starts("sft", "the run host")
    for _ in range(36):
        clock.now += 1
        stream.tick()
    assert lines[1:] == [f"sft: starts the run host, for {seconds} s now" for seconds in (2, 4, 8, 16, 26, 36)]
    stream.starts("sft", None)
    done = result("sft").model_copy(update={"cost": {"startup_seconds": 36.0, "waited_seconds": 3.0, "seconds": 1.0}})
    stream.finished(done)
    assert lines[-1].startswith("sft: done, 40.0 s (start-up 36.0 s, waiting 3.0 s, work 1.0 s)")


RECIPE: dict[str, Any] = {
    "method": "sft",
    "name": "timed",
    "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}},
    "sft": {"data": {"task": "first", "rows": 40}, "training": {"max_steps": 2}},
    "resources": {"trainers": 1},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_every_stage_of_a_real_run_accounts_for_the_time_between_its_two_lines(tmp_path: Path) -> None:
    """The delay of messages to the console, some tenths of a second, is not counted."""
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(RECIPE))
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(file), "--json"]
    environment = {**os.environ, "ALIGN_HOME": str(tmp_path / "home")}
    began: dict[str, float] = {}
    took: dict[str, float] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            event = json.loads(text)
            if event["event"] == "stage_started":
                began[event["stage"]] = time.monotonic()
            elif event["event"] == "stage_finished":
                took[event["label"]] = time.monotonic() - began[event["label"]]
    outcome = event
    assert outcome["status"] == "completed"
    lines = journal_lines(tmp_path / "home", outcome["run_id"])
    for stage in outcome["stages"]:
        parts = [stage["cost"][name] for name in cost.PARTS]
        assert sum(parts) == pytest.approx(took[stage["label"]], abs=2.0)
        known = lines[stage["label"]]
        assert [known.startup_seconds, known.waited_seconds, known.seconds] == pytest.approx(parts)
        assert stage["seconds"] == stage["cost"]["seconds"]


def journal_lines(home: Path, run_id: str) -> dict[str, journal.StageLine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGN_HOME", str(home))
        return journal.stages(run_id)
