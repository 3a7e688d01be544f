"""The report of an incomplete run: why it ended, how to continue it, and its results so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignment_core import journal
from alignment_core.artifacts import Store
from alignment_core.execution.base import StageResult
from alignment_core.reporting.head import head
from alignment_core.reporting.run_report import STAGE_HEAD, Row, RunReport, fenced, of_stages, stage_rows, table


@dataclass(frozen=True)
class Unfinished:
    """Why a run is not complete."""

    what: str
    """``failed``, ``was interrupted``, ``was stopped`` or ``was cancelled``."""
    sentence: str | None
    """The error, if there was one."""
    how: str
    """Advice to continue it, as Markdown."""
    log: str
    """Path of the run's log."""


def unfinished_report(store: Store, name: str, run_id: str, labels: Sequence[str], unfinished: Unfinished) -> RunReport:
    """The report of a run with the stages ``labels``, as far as they were known; their states are in the journal."""
    results = results_so_far(store, run_id)
    lines = journal.stages(run_id)
    progress = journal.progress(run_id)
    report = RunReport()
    report.say(f"# Run {name} {unfinished.what}", "", f"Run `{run_id}`.", "", *head(run_id))
    if unfinished.sentence:
        problem: Row = {"problem": unfinished.sentence}
        report.say(*fenced(problem))
    report.say(unfinished.how, "", f"Its log is `{unfinished.log}`.")
    of_stages(report, store, run_id, results)
    done = {row[0]: row for row in stage_rows(results)}
    rows = []
    for label in dict.fromkeys([*lines, *labels]):
        line, far = lines.get(label), progress.get(label)
        state = "not started" if line is None else "not finished" if line.state == "running" else line.state
        rows.append(done.get(label, (label, state, "", "", "", far.text if far else "")))
    report.say("## Stages", "", *table(STAGE_HEAD, rows))
    return report


def results_so_far(store: Store, run_id: str) -> list[StageResult]:
    """Results of the finished stages of a run, even if the run ended before it could report them."""
    results = []
    for label, line in journal.stages(run_id).items():
        record = store.records.find(line.made_by or line.key)
        if record is None:
            continue
        state = "run" if record.run_ids.get("prefect") == run_id and line.state != "cached" else "cached"
        results.append(StageResult.of(record, label, line.stage, state, line.reason, line.seconds))
    return results
