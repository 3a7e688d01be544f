"""The pages about the runs of this machine: the list, and each run, live while it goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from alignment.flows import access
from alignment.flows.service import services
from alignment.flows.ui.curves import Curve, curve
from alignment.flows.ui.rendering import HEADERS, TEMPLATES, moment, page, start_of
from alignment.flows.ui.sample_rows import SampleRows, Samples
from alignment_core import journal
from alignment_core.artifacts import Provenance, Reference
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.errors import AlignmentError, NotFound, UnknownName, UserError
from alignment_core.evaluation.metric_names import METRICS
from alignment_core.execution.base import shows_of
from alignment_core.host.progress_log import headline
from alignment_core.journal import RunRecord, StageLine, StageProgress, StageWait
from alignment_core.lineage.samples import SAMPLES
from alignment_core.reporting.run_report import PAGE as REPORT
from alignment_core.tracking.metrics_file import read_points

A_PAGE = 50
POLL_SECONDS = 0.25
"""How often the files of a run are looked at for its page."""
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
"""A report is a file of its own, with its style and its figures in it, and no script."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run as it is now."""

    line: StageLine
    progress: StageProgress | None
    wait: StageWait | None
    metrics: str
    """Its key metrics, in a line."""
    curve: Curve | None
    why: str
    """Why it ran or was cached, or how it failed."""

    @property
    def share(self) -> float | None:
        """What is done of it; None if that is unknown."""
        if self.progress is None or not self.progress.total:
            return None
        return self.progress.done / self.progress.total


class RunPages:
    """Pages over the journals of this home, with the results that a snapshot of the store knows."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot
        self._rows = SampleRows(snapshot)

    def listed(self, request: Request) -> Response:
        """All runs, the latest first."""
        start = start_of(request)
        runs = list(reversed(journal.runs()))
        shown = runs[start : start + A_PAGE]
        rows = [(record, journal.status_of(record)) for record in shown]
        return page(request, "runs.html", rows=rows, start=start, more=len(runs) > start + A_PAGE)

    def one(self, request: Request) -> Response:
        """A run: its stages, live while it goes on, why each of them ran or was cached, and its newest completions."""
        record = run_of(request.path_params["run"])
        stages = self.stages(record)
        label, rows = self.newest(record)
        return page(
            request,
            "run.html",
            record=record,
            status=journal.status_of(record),
            stages=stages,
            compares=any(stage.line.stage == "evaluate" for stage in stages),
            prefect=_page_of_prefect(record),
            report=(journal.folder_of(record.run_id) / REPORT).is_file(),
            recipe=json.dumps(record.recipe, indent=1, ensure_ascii=False),
            sampled=label,
            rows=rows,
        )

    def report(self, request: Request) -> Response:
        """The report of a run, as it lies in its folder."""
        record = run_of(request.path_params["run"])
        path = journal.folder_of(record.run_id) / REPORT
        if not path.is_file():
            raise NotFound(f"the run {record.run_id} has no report yet")
        return HTMLResponse(path.read_bytes(), headers={**HEADERS, "Content-Security-Policy": REPORT_POLICY})

    async def events(self, request: Request) -> Response:
        """The table of a run's stages and its newest completions, again whenever they change, as server-sent events."""
        record = await anyio.to_thread.run_sync(run_of, request.path_params["run"])
        return StreamingResponse(self._changes(request, record), media_type="text/event-stream", headers=HEADERS)

    async def _changes(self, request: Request, record: RunRecord) -> AsyncIterator[str]:
        state, sent = None, dict[str, str]()
        yield "retry: 1000\n\n"
        while not await request.is_disconnected():
            files = await anyio.to_thread.run_sync(_state, record)
            if files != state:
                state = files
                status, parts = await anyio.to_thread.run_sync(self._parts, record.run_id)
                for name, html in parts.items():
                    if sent.get(name) != html:
                        sent[name] = html
                        lines = "".join(f"data: {line}\n" for line in html.splitlines())
                        yield f"event: {name}\n{lines}\n"
                if status != "running":
                    yield f"event: over\ndata: {status}\n\n"
                    return
            await anyio.sleep(POLL_SECONDS)

    def _parts(self, run_id: str) -> tuple[str, dict[str, str]]:
        """The state of a run, and the parts of its page that change, by the names of their events."""
        record = journal.read(run_id)
        status = journal.status_of(record)
        label, rows = self.newest(record)
        table = TEMPLATES.get_template("run_stages.html").render(stages=self.stages(record), status=status)
        newest = TEMPLATES.get_template("run_samples.html").render(sampled=label, rows=rows)
        return status, {"stages": table, "samples": newest}

    def stages(self, record: RunRecord) -> list[Stage]:
        """The stages of a run: those that run first, then the others in the order in which they began."""
        progress, waits = journal.progress(record.run_id), journal.waits(record.run_id)
        points = read_points(journal.folder_of(record.run_id))
        lines = journal.stages(record.run_id)
        makers = self._makers(record, [line.made_by for line in lines.values() if line.state == "cached"])
        stages = []
        for label, line in lines.items():
            known = points.get(label, [])
            shows = shows_of(line.stage)
            latest = known[-1][1] if known else {}
            first = {f"{name}.first": known[0][1][name] for name in shows if known and name in known[0][1]}
            drawn = next((name for name in shows if name in latest and name in METRICS), None)
            line_of = (
                curve(METRICS[drawn].title, [(step, m[drawn]) for step, m in known if drawn in m]) if drawn else None
            )
            running = line.state == "running"
            stages.append(
                Stage(
                    line,
                    progress.get(label) if running else None,
                    waits.get(label) if running else None,
                    headline(shows, {**first, **latest}),
                    line_of,
                    _why(line, makers.get(line.made_by)),
                )
            )
        return sorted(stages, key=lambda stage: stage.line.state != "running")

    def newest(self, record: RunRecord) -> tuple[str, Samples | None]:
        """The stage of a run that sampled last, and some of its completions; nothing if none did, or it is in another store."""
        done = [line for line in journal.stages(record.run_id).values() if line.stage in SAMPLES and line.reference]
        if not done or record.store != self.snapshot.store.uri:
            return "", None
        line = max(done, key=lambda line: line.at)
        for text in line.outputs.values():
            try:
                if (rows := self._rows.of(Reference.parse(text), None, 0)) is not None:
                    return line.label, rows
            except (AlignmentError, OSError):
                continue
        return "", None

    def _makers(self, record: RunRecord, keys: list[str]) -> dict[str, Provenance]:
        """The records with these keys, if the run's store is the one of the pages."""
        if not keys or record.store != self.snapshot.store.uri:
            return {}
        try:
            with self.snapshot.reading() as view:
                return view.by_key(keys)
        except (AlignmentError, OSError):
            return {}


def run_of(text: str) -> RunRecord:
    """The run with an id, or with one that begins so. Raises UnknownName."""
    try:
        return journal.find(text)
    except UserError as error:
        raise UnknownName(str(error)) from None


def _page_of_prefect(record: RunRecord) -> str:
    """The run's page on the Prefect server of `align up`, if it is up and the run used it."""
    state = services.running()
    if state is None or state.phase != "ready" or not access.same_server(record.server, state.url):
        return ""
    return f"{state.url.removesuffix('/api')}/runs/flow-run/{record.run_id}"


def _why(line: StageLine, maker: Provenance | None) -> str:
    if maker is None:
        return line.reason
    run = maker.run_ids.get("prefect", "")
    of_run = f", run {journal.short_id(run)}" if run else ""
    return f"same key as {maker.label} of {moment(maker.finished_at)}{of_run}"


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
