"""Runs queue for the machine: order, reported reasons, and recovery from killed runs."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import RunName, Ticket

SECONDS = 20.0
RUN = """
import json, sys, threading
from pathlib import Path
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import RunName, Ticket

def say(*words):
    print(json.dumps(words), flush=True)

def stage(label):
    ticket = Ticket(waits=lambda reason: say(label, "waits", reason), label=label, run=RunName(sys.argv[2], "nightly"))
    with machine.use(ticket):
        say(label, "has it")
        ended[label].wait()

machine, ended = MachineQueue(Path(sys.argv[1]), lambda: say("gives up")), {}
for line in sys.stdin:
    command, label = line.split()
    if command == "start":
        ended[label] = threading.Event()
        threading.Thread(target=stage, args=(label,), daemon=True).start()
    else:
        ended[label].set()
"""


class Run:
    """A run in a separate process, whose stages start and end on command."""

    def __init__(self, folder: Path, name: str) -> None:
        command = [sys.executable, "-c", RUN, str(folder), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.messages: queue.Queue[list[Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.messages.put(json.loads(line))

    def tell(self, command: str, label: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {label}\n")
        self.process.stdin.flush()

    def hears(self) -> list[Any]:
        return self.messages.get(timeout=SECONDS)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS)


NewRun = Callable[[str], Run]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    runs: list[Run] = []

    def start(name: str) -> Run:
        runs.append(Run(tmp_path, name))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def uses(run: str, label: str) -> str:
    return f"the machine: run {run} (nightly) uses it for {label}"


def test_a_stage_of_another_run_waits_and_reports_the_run_and_stages_that_use_the_machine(new_run: NewRun) -> None:
    first, second = new_run("first"), new_run("second")
    first.tell("start", "round-1/dpo")
    assert first.hears() == ["round-1/dpo", "has it"]
    second.tell("start", "sft")
    assert second.hears() == ["sft", "waits", uses("first", "round-1/dpo")]
    first.tell("end", "round-1/dpo")
    assert first.hears() == ["gives up"], "before the other run has the machine"
    assert second.hears() == ["sft", "waits", None]
    assert second.hears() == ["sft", "has it"]


def test_stages_of_one_run_use_the_machine_together_and_the_run_keeps_the_machine_while_no_other_waits(
    new_run: NewRun,
) -> None:
    run = new_run("first")
    for label in ("generate", "dpo"):
        run.tell("start", label)
        assert run.hears() == [label, "has it"]
    for label in ("generate", "dpo"):
        run.tell("end", label)
    run.tell("start", "score")
    assert run.hears() == ["score", "has it"], "without having given it up in between"


def test_a_clock_that_steps_back_does_not_change_the_order_of_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, clock = MachineQueue(tmp_path), iter(range(10**18, 0, -(10**17)))
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    with machine._slot(Ticket()) as first, machine._slot(Ticket()) as second, machine._slot(Ticket()) as third:
        assert sorted([third, second, first]) == [first, second, third]


def test_a_run_that_has_the_machine_queues_behind_another_that_waits(new_run: NewRun) -> None:
    first, second = new_run("first"), new_run("second")
    first.tell("start", "generate")
    assert first.hears() == ["generate", "has it"]
    second.tell("start", "sft")
    assert second.hears()[1] == "waits"
    first.tell("start", "dpo")
    assert first.hears() == ["dpo", "waits", "the machine: run second (nightly) asked for it earlier for sft"]
    first.tell("end", "generate")
    assert first.hears() == ["gives up"]
    assert [second.hears(), second.hears()] == [["sft", "waits", None], ["sft", "has it"]]
    assert first.hears() == ["dpo", "waits", uses("second", "sft")]
    second.tell("end", "sft")
    assert [first.hears(), first.hears()] == [["dpo", "waits", None], ["dpo", "has it"]]


def test_runs_get_the_machine_in_the_order_of_their_requests(new_run: NewRun) -> None:
    runs = [new_run(name) for name in ("1", "2", "3", "4")]
    for run in runs:
        run.tell("start", "sft")
        assert run.hears()[:2] == ["sft", "has it" if run is runs[0] else "waits"]
    for run, following in pairwise(runs):
        run.tell("end", "sft")
        while (report := following.hears()) != ["sft", "has it"]:
            assert report[:2] == ["sft", "waits"]


def test_a_killed_run_frees_the_machine(new_run: NewRun) -> None:
    first, second = new_run("first"), new_run("second")
    first.tell("start", "sft")
    assert first.hears() == ["sft", "has it"]
    second.tell("start", "sft")
    assert second.hears() == ["sft", "waits", uses("first", "sft")]
    first.kill()
    assert [second.hears(), second.hears()] == [["sft", "waits", None], ["sft", "has it"]]


def test_a_killed_run_frees_its_place_in_the_queue(new_run: NewRun, tmp_path: Path) -> None:
    first, second, third = new_run("first"), new_run("second"), new_run("third")
    for run in (first, second, third):
        run.tell("start", "sft")
        run.hears()
    second.kill()
    first.tell("end", "sft")
    assert [third.hears(), third.hears()] == [["sft", "waits", None], ["sft", "has it"]]
    assert not list(tmp_path.glob("*.queue/*")), "no slot is left"


def test_deferrable_work_leaves_the_machine_to_other_runs(new_run: NewRun, tmp_path: Path) -> None:
    machine, other = MachineQueue(tmp_path), new_run("other")
    with machine.use_if_free(Ticket(run=RunName("warm"))) as entered:
        assert entered
        other.tell("start", "sft")
        assert other.hears()[1] == "waits"
        with machine.use_if_free(Ticket()) as entered_again:
            assert not entered_again, "another run waits"
    assert [other.hears(), other.hears()] == [["sft", "waits", None], ["sft", "has it"]]
    with machine.use_if_free(Ticket()) as entered:
        assert not entered, "another run has it"


def test_a_stage_that_waits_for_its_own_run_reports_no_other_run(tmp_path: Path) -> None:
    machine = MachineQueue(tmp_path)
    with machine._slot(Ticket(label="the start of its actors")):
        assert machine._reason() is None
        with machine._slot(Ticket(label="sft")):
            assert machine._reason() is None


def test_a_holder_that_cannot_be_read_is_another_run(new_run: NewRun, tmp_path: Path) -> None:
    machine, other = MachineQueue(tmp_path), new_run("other")
    with machine.use(Ticket(label="sft")):
        (holder,) = tmp_path.glob("*.json")
        holder.write_text('{"run":')
        other.tell("start", "sft")
        assert other.hears() == ["sft", "waits", "the machine: another run uses it"]


def test_containers_of_one_machine_share_one_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = MachineQueue(tmp_path)
    monkeypatch.setattr("platform.node", lambda: "another-container")
    second = MachineQueue(tmp_path)
    with first.use(Ticket()), second.use_if_free(Ticket()) as entered:
        assert not entered
