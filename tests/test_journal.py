"""The journal of runs: read during a run, after it was killed, and by the attempt that continues it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli.services import _doing
from alignment_core import journal
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.journal import Journal, RunRecord, new_record

RUN = """
import sys, time
from alignment_core.journal import Journal, new_record
with Journal(new_record(sys.argv[1], "small", {}, "store")).open() as journal:
    journal.stage("sft", "running", stage="sft", key="k", key_parts={"seed": 1})
    journal.progress("sft", 3, 10, "steps")
    print("open", flush=True)
    time.sleep(600)
"""
Start = Callable[[str], subprocess.Popen[bytes]]


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def start() -> Iterator[Start]:
    """A process that has a run open, by the run's id."""
    started = []

    def run(run_id: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", RUN, run_id], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def record(run_id: str, **changes: Any) -> RunRecord:
    return new_record(run_id, "small", {}, "store").model_copy(update=changes)


def test_a_run_is_alive_as_long_as_its_process_and_its_journal_survives(start: Start) -> None:
    process = start("a1")
    assert journal.is_alive(journal.read("a1"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert journal.is_alive(journal.read("a1")) is False
    assert journal.read("a1").status == "running", "no process was left to record the end"
    assert journal.stages("a1")["sft"].key_parts == {"seed": 1}
    assert (journal.progress("a1")["sft"].done, journal.progress("a1")["sft"].total) == (3, 10)


def test_the_old_process_is_ended_and_the_attempt_number_increases(start: Start) -> None:
    start("a1")
    assert journal.end_process(journal.read("a1"), grace=0) is True
    assert journal.end_process(journal.read("a1"), grace=0) is False, "it was dead already"
    with Journal(record("a1")).open() as second:
        assert second.record.attempt == 2
        assert journal.progress("a1") == {}
    assert journal.read("a1").status == "completed"


def test_a_process_that_only_has_the_same_number_is_left_alone(start: Start) -> None:
    process = start("a1")
    running = journal.read("a1")
    for other in ({"started": 1}, {"boot": "another boot"}, {"boot": running.boot.replace("pid:[", "pid:[9")}):
        with pytest.raises(EnvironmentFault, match="in another container or on another machine"):
            journal.end_process(running.model_copy(update=other), grace=0)
    assert process.poll() is None


def test_a_process_that_does_not_end_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("a1")
    monkeypatch.setattr(journal, "END_SECONDS", 0.1)
    monkeypatch.setattr("psutil.Process.terminate", lambda _: None)
    monkeypatch.setattr("psutil.Process.kill", lambda _: None)
    with pytest.raises(EnvironmentFault, match="does not end; end it by hand"):
        journal.end_process(journal.read("a1"), grace=0)


def test_a_new_host_name_and_a_step_of_the_clock_change_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(record("over")).open():
        pass
    start("killed").kill()
    process = start("alive")
    monkeypatch.setattr("socket.gethostname", lambda: "another-container")
    monkeypatch.setattr("time.time", lambda step=time.time: step() + 7 * 86400)
    monkeypatch.setattr("psutil.Process.create_time", lambda _: 1.0)  # it follows the clock
    assert journal.end_process(journal.read("over"), grace=0) is False
    assert journal.end_process(journal.read("killed"), grace=0) is False
    assert journal.is_alive(journal.read("alive"))
    assert journal.end_process(journal.read("alive"), grace=0) is True
    assert process.wait(5) != 0


@pytest.mark.parametrize(("error", "status"), [(ValueError("bad"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_the_end_of_a_run_is_recorded(error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), Journal(record("a1")).open():
        raise error
    assert journal.read("a1").status == status


def test_a_line_truncated_by_a_kill_is_skipped() -> None:
    with Journal(record("a1")).open() as writing:
        writing.stage("sft", "running", stage="sft", key="k", key_parts={})
        writing.stage("sft", "run", reason="first", seconds=1.5, outputs={"model": "model@sha256:" + "0" * 64})
        with (writing.folder / journal.STAGES).open("a") as file:
            file.write('{"label": "dpo", "sta')
    with Journal(record("a1")).open() as again:
        again.stage("dpo", "running", stage="dpo", key="d", key_parts={})
    sft, dpo = journal.stages("a1").values()
    assert (sft.state, sft.reason, sft.key) == ("run", "first", "k")
    assert dpo.key == "d"


def test_a_half_written_line_loses_no_other_line() -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Journal(record("a1")).open() as writing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        writing.stage("sft", "running", stage="sft", key="k", key_parts={"seed": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        assert journal.stages("a1") == {}
        writing.stage("sft", "run", reason="first", seconds=1.5)
    (sft,) = journal.stages("a1").values()
    assert (sft.state, sft.key, sft.key_parts, sft.reason) == ("run", "k", {"seed": 1}, "first")


def test_a_stage_with_lost_lines_is_left_out(home: Path) -> None:
    with Journal(record("a1")).open() as writing:
        writing.stage("sft", "running", stage="sft", key="k", key_parts={})
        lost = '{"label": "dpo", "state": "run", "at": "2026-01-01", "seconds": 1.0}'
        (home / "runs" / "a1" / journal.STAGES).open("ab").write(b"\xff\0\n" + lost.encode() + b"\n")
        (home / "runs" / "a1" / journal.PROGRESS).write_text("")
    assert list(journal.stages("a1")) == ["sft"]
    assert journal.progress("a1") == {}


def test_old_runs_are_pruned_unless_open_in_a_process(home: Path, start: Start) -> None:
    start("alive")
    for run_id in ("old", "new"):
        with Journal(record(run_id)).open():
            pass
    for run_id in ("alive", "old"):
        os.utime(home / "runs" / run_id / journal.STAGES, (0, 0))
    assert journal.prune(days=90) == 1
    assert {run.run_id for run in journal.runs()} == {"alive", "new"}


def test_keys_and_artifacts_of_live_runs_are_in_use(start: Start) -> None:
    start("alive")
    with Journal(record("mine")).open() as mine:
        mine.stage("rl", "run", stage="rl", key="r", key_parts={}, outputs={"model": "model@sha256:" + "0" * 64})
        assert journal.in_use() == {"k", "r", "model@sha256:" + "0" * 64}
        assert journal.in_use(but="mine") == {"k"}
    assert journal.in_use() == {"k"}


def test_runs_are_found_by_their_first_digits_or_as_the_last(home: Path) -> None:
    with pytest.raises(UserError, match="no run yet in"):
        journal.find("last")
    for run_id, started in (("abc1", "2026-01-01"), ("abc2", "2026-01-02"), ("def3", "2026-01-03")):
        with Journal(record(run_id, started_at=started)).open():
            pass
    assert journal.find("last").run_id == "def3"
    assert journal.find("d").run_id == "def3"
    with pytest.raises(UserError, match=r"'abc' matches several runs.*abc1 \(small\), abc2 \(small\)"):
        journal.find("abc")
    with pytest.raises(UserError, match="'x' is not a run"):
        journal.find("x")
    (home / "runs" / "def3" / journal.RUN).write_text("{")
    assert [run.run_id for run in journal.runs()] == ["abc1", "abc2"]
    assert os.listdir(home / "runs" / "def3")


def test_status_shows_the_cause_and_duration_of_a_stages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(record("a1")).open() as journal_:
        for label in ("sft", "evaluation/prompts"):
            journal_.stage(label, "running", stage=label, key="k", key_parts={})
        journal_.progress("sft", 3, 10, "steps")
        journal_.waits("sft", "the machine: run 1a2b3c4d (quickstart) uses it for dpo")
        since = journal.waits("a1")["sft"].since
        journal_.waits("sft", "the machine: run 1a2b3c4d (quickstart) asked for it earlier for score")
        monkeypatch.setattr(time, "time", lambda: since + 40)
        waiting = "has waited 40 s for the machine: run 1a2b3c4d (quickstart) asked for it earlier for score"
        assert _doing(journal.read("a1")) == {"sft": waiting}
        journal_.waits("sft", None)
        assert _doing(journal.read("a1")) == {"sft": "3 of 10 steps"}


def test_ids_of_the_same_moment_are_shortened_to_a_distinct_prefix() -> None:
    """Version 7 of RFC 9562: 48 bits of time, 12 random ones in the third group, 14 in the fourth."""
    of_a_schedule = ["01a2146e-b981-7190-bf52-85b29d2fad1e", "01a2146e-b981-7c7e-9c61-1c9850d1203d"]
    shown = [journal.short_id(run) for run in of_a_schedule]
    assert shown == ["01a2146e-b981-7190-bf52", "01a2146e-b981-7c7e-9c61"]
    for run, short in zip(of_a_schedule, shown, strict=True):
        with Journal(record(run)).open():
            pass
        assert run.startswith(short)
    assert [journal.find(short).run_id for short in shown] == of_a_schedule
    with pytest.raises(UserError, match=r"01a2146e-b981-7190-bf52 .*, 01a2146e-b981-7c7e-9c61 "):
        journal.find("01a2146e")
    assert journal.short_id("11e23bd6-8d6c-46a8-875a-d1dcd758a428") == "11e23bd6"
