"""A run as a stream of events: output without a terminal, and with ``--json``."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from alignment.flows.cli.display import LiveDisplay
from alignment.flows.cli.stream import EventStream
from alignment.flows.console import print_json
from alignment_core.tracking import Progress
from tests.host.test_progress_log import Clock
from tests.tracking.watched import result


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_progress_lines_of_a_run_become_rarer_with_time(clock):
    events: list[dict] = []
    stream = EventStream(events.append, clock)
    stream.opened("1a2b3c4d5e", "small", "/runs/1a", "/logs/1a.log")
    stream.started("sft")
    for step in range(240):
        clock.now += 0.5
        stream.progress("sft", Progress(step, 240, "steps", {"loss": 2 / (step + 1)}, {"loss": "loss"}))
        stream.tick()
    stream.finished(result("sft", **{"loss": 0.01, "loss.first": 2.0, "warnings": ["the policy is what it was"]}))
    kinds = [event["event"] for event in events]
    assert kinds == ["run_started", "stage_started", *["progress"] * 7, "stage_finished", "warning"]
    assert [event["seconds"] for event in events if event["event"] == "progress"] == [2, 4, 8, 16, 32, 62, 92]
    assert events[2]["text"] == "sft: 3/240 steps · loss 0.500 · 2 steps/s · 1 min 58 s left"
    assert events[2]["metrics"] == {"loss": 0.5}
    assert events[-2]["text"] == "sft: done, 1.0 s · loss 2.000 → 0.01"
    assert events[-1]["text"] == "warning: sft: the policy is what it was"


def test_a_stage_that_reports_nothing_or_waits_is_not_silent(clock):
    lines: list[str] = []
    stream = EventStream(lambda event: lines.append(event["text"]), clock)
    stream.started("model")
    clock.now += 2
    stream.tick()
    stream.waits("model", "another run")
    for _ in range(18):
        clock.now += 4
        stream.tick()
    stream.waits("model", None)
    assert lines == [
        "model: starts",
        "model: runs for 2 s",
        "model: waits for another run",
        "model: runs for 1 min 2 s · waits for another run",
        "model: continues",
    ]


def test_a_stage_that_failed_while_the_run_continues_runs_no_longer(clock):
    lines: list[str] = []
    stream = EventStream(lambda event: lines.append(event["text"]), clock)
    stream.started("a/sft")
    stream.failed("a/sft", "failed; stages that do not need it continue: the loss is not finite")
    clock.now += 60
    stream.tick()
    assert lines == [
        "a/sft: starts",
        "warning: a/sft: failed; stages that do not need it continue: the loss is not finite",
    ]
    display = LiveDisplay(Console(file=io.StringIO()))
    display.started("a/sft")
    display.failed("a/sft", "failed")
    assert display.bars.tasks == []


def test_a_reader_that_has_gone_does_not_affect_the_run(clock):
    def nobody_reads(event):
        events.append(event)
        raise BrokenPipeError

    events: list[dict] = []
    with EventStream(nobody_reads, clock) as stream:
        stream.opened("1a2b3c4d5e", "small", "/runs/1a", "/logs/1a.log")
        stream.started("sft")
        stream.warn("W&B: does not answer")
    assert len(events) == 1


def test_each_event_is_a_json_object_on_a_line_of_its_own(clock, capsys):
    with EventStream(print_json, clock) as stream:
        stream.started("sft")
        stream.warn("W&B: does not answer")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["stage_started", "warning"]
    assert lines[1]["sentence"] == "W&B: does not answer"
