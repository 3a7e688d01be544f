"""The cost of a stage: time without waits, device-seconds, tokens, and the sums of a run."""

from __future__ import annotations

import time

from alignment_core.execution.cost import Meter, per_step, tokens, total
from alignment_core.execution.scheduling import Ticket
from alignment_core.execution.stopwatch import Stopwatch


def test_waits_are_passed_on_and_do_not_count_as_work() -> None:
    waits: list[str | None] = []
    meter = Meter(Ticket(waits=waits.append))
    began = time.monotonic()
    meter.ticket.waits("the machine: run A uses it for sft")
    time.sleep(0.05)
    meter.ticket.waits("the machine: run A uses it for dpo")  # the reason changed, the wait continues
    time.sleep(0.05)
    meter.ticket.waits(None)
    cost, wall = meter.cost(), time.monotonic() - began
    assert len(waits) == 3
    assert cost["waited_seconds"] >= 0.1
    assert cost["seconds"] + cost["waited_seconds"] <= wall + 0.002  # each is rounded to a millisecond


def test_device_seconds_add_up_over_several_machines() -> None:
    meter = Meter(Ticket())
    meter.ticket.used(2.5)
    meter.ticket.used(4.0)
    assert meter.cost()["device_seconds"] == 6.5


def test_a_run_costs_the_sum_of_its_stages() -> None:
    sampling = {
        "seconds": 2.0,
        "device_seconds": 4.0,
        "prompt_tokens": 10,
        "completion_tokens": 90,
        "train_seconds": 1.0,
    }
    training = {"seconds": 3.0, "device_seconds": 6.0, "train_tokens": 1000}
    assert tokens(sampling) == 100
    summed = total([sampling, training])
    assert (summed["seconds"], summed["device_seconds"]) == (5.0, 10.0)
    assert tokens(summed) == 1100
    assert "train_seconds" not in summed, "parts of a stage's own time are not summed"


def test_the_parts_of_a_step_are_the_seconds_that_a_stage_names_over_its_steps() -> None:
    cost = {"seconds": 60.0, "waited_seconds": 1.0, "steps": 4.0, "train_seconds": 8.0, "generate_seconds": 2.0}
    assert per_step(cost) == {"train": 2.0, "generate": 0.5}
    assert per_step({"seconds": 1.0, "score_seconds": 0.5}) == {}, "it has no steps"


def test_a_part_within_another_counts_for_itself_alone() -> None:
    watch = Stopwatch()
    began = time.monotonic()
    with watch.part("outer"):
        time.sleep(0.05)
        with watch.part("inner"):
            time.sleep(0.1)
        with watch.part("inner"):
            pass
    wall = time.monotonic() - began
    assert watch.seconds["inner"] >= 0.1
    assert 0.05 <= watch.seconds["outer"] <= wall - watch.seconds["inner"] + 1e-6
