"""Restarts of a stage are shown on the console, in the journal, in the report and by `align watch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.flows.cli.stream import EventStream
from alignment.flows.service import follow
from alignment_core.artifacts import Store
from alignment_core.journal import Journal, new_record, stages
from alignment_core.printable import markdown_line
from alignment_core.reporting.run_report import run_report
from alignment_core.reporting.unfinished import Unfinished, unfinished_report

SENTENCE = "trainers: an actor died during `train` (trainers[1]): its process 3885 ended; restart 1 of 3"


@pytest.fixture(autouse=True)
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose stage restarted once."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    with Journal(new_record("run", "small", {}, "store")).open() as journal:
        journal.stage("sft", "running", stage="sft", key="a" * 64, key_parts={})
        journal.restart("sft", SENTENCE)
        journal.restart("sft", "another")


def test_the_console_shows_restarts_as_a_warning_of_the_stage() -> None:
    events: list[dict[str, object]] = []
    stream = EventStream(events.append)
    stream.started("sft")
    stream.warned("sft", SENTENCE)
    assert events[-1] == {
        "event": "warning",
        "text": f"warning: sft: {SENTENCE}",
        "stage": "sft",
        "sentence": f"sft: {SENTENCE}",
    }


def test_the_journal_keeps_every_restart_and_the_state_of_the_stage() -> None:
    (line,) = stages("run").values()
    assert (line.state, line.restarts) == ("running", (SENTENCE, "another"))


def test_reports_of_complete_and_unfinished_runs_show_restarts(store: Store) -> None:
    complete = run_report(store, "small", "run", [], {}).markdown
    unfinished = unfinished_report(store, "small", "run", [], Unfinished("failed", None, "", "log")).markdown
    for report in (complete, unfinished):
        assert f"**Warning:** sft: {markdown_line(SENTENCE)}" in report
        assert "**Warning:** sft: another" in report


def test_listeners_of_a_run_get_each_restart_once() -> None:
    lines: list[str] = []
    watched = follow._Stages("run", lines.append)
    watched.look()
    watched.look()
    assert lines == [f"sft: {SENTENCE}", "sft: another", "sft: running"]


def test_an_attempt_that_is_resumed_adds_its_restarts_to_those_of_the_attempts_before() -> None:
    lines: list[str] = []
    watched = follow._Stages("run", lines.append)
    watched.look()
    with Journal(new_record("run", "small", {}, "store")).open() as journal:
        journal.stage("sft", "running", stage="sft", key="0" * 64, key_parts={})
        journal.restart("sft", "once more")
    watched.look()
    assert stages("run")["sft"].restarts == (SENTENCE, "another", "once more")
    assert "sft: once more" in lines
