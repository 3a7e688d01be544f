"""The report of a run in its folder and on its page in the Prefect UI, and the tables there.

They are views: if one cannot be written, the run continues with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from alignment.flows import access
from alignment.flows.costs import cost_cells, promotion_line, run_cost, step_rows
from alignment.tasks.stage import Run
from alignment_core.artifacts import Reference
from alignment_core.errors import AlignmentError, Stopped, UserError
from alignment_core.execution.base import StageResult
from alignment_core.journal import short_id
from alignment_core.reporting.results import HEAD, result_rows
from alignment_core.reporting.run_report import RunReport, run_report
from alignment_core.reporting.unfinished import Unfinished, unfinished_report
from alignment_core.stages.report import cell, columns_of
from alignment_core.stages.variants import table as variants_table

NONE = "there is none"


def leave_report(
    name: str,
    run: Run,
    stages: Sequence[StageResult],
    outputs: Mapping[str, Reference],
    promotion: Mapping[str, Any] | None,
    notes: Sequence[str],
    failed: Mapping[str, str],
) -> str | None:
    """Write the report of a completed run, in which some stages may have ``failed``; it begins with ``notes``.

    Returns the path of its Markdown, or None if it cannot be written.
    """
    with only_shown("the run's report", NONE):
        decided = promotion_line(promotion) if promotion else None
        report = run_report(run.store, name, run.journal.record.run_id, stages, outputs, decided, notes, failed)
        return _leave(name, run, report)
    return None


def leave_unfinished(name: str, run: Run, error: BaseException, cancelled: bool) -> str | None:
    """Write the report of an incomplete run: results so far, why it ended, and how to continue.

    Requests to the server are not retried, because the process is ending.
    """
    with only_shown("the run's report", NONE), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        unfinished = why_unfinished(run.journal.record.run_id, error, cancelled, str(run.host.log))
        report = unfinished_report(
            run.store, name, run.journal.record.run_id, [step.label for step in run.steps], unfinished
        )
        return _leave(name, run, report)
    return None


def why_unfinished(run_id: str, error: BaseException, cancelled: bool, log: str) -> Unfinished:
    """Why a run is incomplete, and how to continue it."""
    resume = f"`align resume {short_id(run_id)}` continues"
    kept = "finished stages are kept"
    if cancelled:
        return Unfinished("was cancelled", None, f"{resume} where it stopped: {kept}.", log)
    if not isinstance(error, Exception) or isinstance(error, Stopped):
        ended = "was interrupted" if isinstance(error, KeyboardInterrupt) else "was stopped"
        return Unfinished(ended, None, f"{resume} where it stopped: {kept}.", log)
    known = str(error) if isinstance(error, AlignmentError) else access.lost_server(error)
    sentence = known or f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        how = f"Once that is fixed, {resume}, and so does `align run` with a recipe that was changed: {kept}."
        return Unfinished("failed", sentence, how, log)
    return Unfinished("failed", sentence, f"{resume} where it stopped: {kept}.", log)


def _leave(name: str, run: Run, report: RunReport) -> str:
    """Write a report to the run's folder, trackers and page; returns its path."""
    path = str(report.write(run.journal.folder))
    with only_shown("the run's report"):
        for listener in run.listeners:
            listener.texts("samples", report.texts)
        _show_page(name, UUID(run.journal.record.run_id), report.html)
    return path


def _show_page(name: str, flow_run: UUID, html: str) -> None:
    """Make the report an artifact of the run. The UI shows it in a frame that runs no scripts and loads nothing.

    It is the run's only artifact with a key, so the UI's page of artifacts has one line for each recipe, with the reports of
    all its runs. Further keys would cost time: for an artifact with a key the server emits an event while its SQLite
    transaction is open, and has been seen to block itself for a minute if many came at once. A resumed run replaces its report.
    """
    csp = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    page = ArtifactCreate(
        key=_artifact_key(name),
        type="rich",
        description=f"Report of {name}: curves, text, lineage",
        data={"html": html, "sandbox": [], "csp": csp},
        flow_run_id=flow_run,
    )
    of_this_run = ArtifactFilter.model_validate(
        {"flow_run_id": {"any_": [flow_run]}, "key": {"any_": [_artifact_key(name)]}}
    )
    with get_client(sync_client=True) as client:
        for earlier in client.read_artifacts(artifact_filter=of_this_run):
            client.delete_artifact(earlier.id)
        client.create_artifact(page)


def _artifact_key(name: str) -> str:
    """A key of small letters, digits and dashes, as Prefect requires."""
    return re.sub("[^a-z0-9]+", "-", name).strip("-")


@contextmanager
def only_shown(what: str, problem: str = "not on the run's page") -> Iterator[None]:
    """Turn an error of a view into a warning; the run continues."""
    try:
        yield
    except Exception as error:
        get_run_logger().warning("%s: %s: %s: %s", what, problem, type(error).__name__, error)


def leave_tables(stages: Sequence[StageResult], metrics: Mapping[str, Any]) -> None:
    """Write the run's tables to its page in the Prefect UI."""
    with only_shown("the run's tables"):
        table = [
            {
                "stage": s.label,
                "state": s.state,
                **cost_cells(s.cost if s.state == "run" else {}),
                "outputs": ", ".join(output.short for output in s.outputs.values()),
                "why": s.reason,
            }
            for s in stages
        ]
        table.append({"stage": "total", "state": "", **cost_cells(run_cost(stages)), "outputs": "", "why": ""})
        create_table_artifact(table=table, description="Stages of this run")
        if steps := step_rows(stages):
            create_table_artifact(table=steps, description="Seconds of a step, by part")
        if variants := metrics.get("variants"):
            head, cells = variants_table(metrics["metric"], variants)
            rows = [dict(zip(head, row, strict=True)) for row in cells]
            create_table_artifact(table=rows, description="Variants, best first")
        policies = metrics.get("policies", {})
        if policies:
            shown = columns_of(policies)
            rows = [
                {"policy": name, **{title: cell(values, column) for column, title in shown}}
                for name, values in policies.items()
            ]
            create_table_artifact(table=rows, description="Policies on the held-out prompts")
        measured = [
            {"group": group, **dict(zip(HEAD, cells, strict=True))}
            for group, listed in result_rows(metrics).items()
            for cells in listed
        ]
        if measured:
            create_table_artifact(table=measured, description="Metrics")
