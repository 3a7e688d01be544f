"""The pages about the runs of this machine: the list, and each run, live while it goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from alignment.flows.ui.curves import Curve, curve
from alignment.flows.ui.rendering import HEADERS, TEMPLATES, page, start_of
from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.errors import AlignmentError, NotFound, UnknownName, UserError
from alignment_core.evaluation.metric_names import METRICS
from alignment_core.execution.base import shows_of
from alignment_core.host.progress_log import headline
from alignment_core.journal import RunRecord, StageLine, StageProgress, StageWait
from alignment_core.lineage.explain import explain
from alignment_core.reporting.run_report import PAGE as REPORT
from alignment_core.tracking.metrics_file import read_points

A_PAGE = 50
POLL_SECONDS = 0.25
"""How often the files of a run are looked at for its page."""
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""A report is a file of its own, with its style and its figures in it, and no script."""
ORDER = ("running", "failed", "stopped", "run", "cached")


@dataclass(frozen=True)
class Stage:
    """A stage of a run as it is now."""

    line: StageLine
    progress: StageProgress | None
    wait: StageWait | None
    metrics: str
    """Its key metrics, in a line."""
    curve: Curve | None

    @property
    def share(self) -> float | None:
        """What is done of it; None if that is unknown."""
        known = self.progress is not None and self.progress.total
        return self.progress.done / self.progress.total if known and self.progress and self.progress.total else None


def listed(request: Request) -> Response:
    """All runs, the latest first."""
    start = start_of(request)
    runs = list(reversed(journal.runs()))
    shown = runs[start : start + A_PAGE]
    rows = [(record, journal.status_of(record)) for record in shown]
    return page(request, "runs.html", rows=rows, start=start, more=len(runs) > start + A_PAGE)


def one(request: Request) -> Response:
    """A run: its stages, live while it goes on, and why each of them ran or was cached."""
    record = _found(request)
    return page(
        request,
        "run.html",
        record=record,
        status=journal.status_of(record),
        stages=stages_of(record),
        why=_why(record),
        report=(journal.folder_of(record.run_id) / REPORT).is_file(),
        recipe=json.dumps(record.recipe, indent=1, ensure_ascii=False),
    )


def report(request: Request) -> Response:
    """The report of a run, as it lies in its folder."""
    record = _found(request)
    path = journal.folder_of(record.run_id) / REPORT
    if not path.is_file():
        raise NotFound(f"the run {record.run_id} has no report yet")
    return HTMLResponse(path.read_bytes(), headers={**HEADERS, "Content-Security-Policy": REPORT_POLICY})


def _found(request: Request) -> RunRecord:
    """The run that the address names. Raises UnknownName."""
    try:
        return journal.find(request.path_params["run"])
    except UserError as error:
        raise UnknownName(str(error)) from None


async def events(request: Request) -> Response:
    """The table of a run's stages, again whenever it changes, as server-sent events."""
    record = await anyio.to_thread.run_sync(_found, request)
    return StreamingResponse(_changes(request, record), media_type="text/event-stream", headers=HEADERS)


async def _changes(request: Request, record: RunRecord) -> AsyncIterator[str]:
    before = None
    yield "retry: 1000\n\n"
    while not await request.is_disconnected():
        files = await anyio.to_thread.run_sync(_state, record)
        if files != before:
            before = files
            record, status, table = await anyio.to_thread.run_sync(_table, record.run_id)
            lines = "".join(f"data: {line}\n" for line in table.splitlines())
            yield f"event: stages\n{lines}\n"
            if status != "running":
                yield f"event: over\ndata: {status}\n\n"
                return
        await anyio.sleep(POLL_SECONDS)


def _state(record: RunRecord) -> tuple[bool, tuple[tuple[str, int, int], ...]]:
    """Whether a run's process is alive, and names, times and sizes of its files."""
    entries = []
    for path in journal.folder_of(record.run_id).iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.suffix in (".json", ".jsonl"):
            entries.append((path.name, stat.st_mtime_ns, stat.st_size))
    return journal.is_alive(record), tuple(sorted(entries))


def _table(run_id: str) -> tuple[RunRecord, str, str]:
    record = journal.read(run_id)
    status = journal.status_of(record)
    return record, status, TEMPLATES.get_template("run_stages.html").render(stages=stages_of(record), status=status)


def stages_of(record: RunRecord) -> list[Stage]:
    """The stages of a run: those that run first, then the others in the order in which they began."""
    progress, waits = journal.progress(record.run_id), journal.waits(record.run_id)
    points = read_points(journal.folder_of(record.run_id))
    stages = []
    for label, line in journal.stages(record.run_id).items():
        known = points.get(label, [])
        shows = shows_of(line.stage)
        latest = known[-1][1] if known else {}
        first = {f"{name}.first": known[0][1][name] for name in shows if known and name in known[0][1]}
        drawn = next((name for name in shows if name in latest and name in METRICS), None)
        line_of = curve(METRICS[drawn].title, [(step, m[drawn]) for step, m in known if drawn in m]) if drawn else None
        running = line.state == "running"
        stages.append(
            Stage(
                line,
                progress.get(label) if running else None,
                waits.get(label) if running else None,
                headline(shows, {**first, **latest}),
                line_of,
            )
        )
    return sorted(stages, key=lambda stage: stage.line.state != "running")


def _why(record: RunRecord) -> dict[str, str]:
    """Why each stage ran or was cached, by label; empty if the store cannot be read."""
    lines = journal.stages(record.run_id).values()
    stages = {str(line.key_parts.get("stage", line.stage)) for line in lines}
    try:
        records = open_store(record.store, writes=False).records.all(*stages)
        return {entry.label: entry.why for entry in explain(lines, records, record.run_id)}
    except (AlignmentError, OSError):
        return {}
