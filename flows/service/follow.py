"""Follow a run to its end, across crashes, resumptions and outages of its server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from alignment.flows import access, run_queue
from alignment.flows.service import services
from alignment_core import journal
from alignment_core.errors import EnvironmentFault, NotFound
from alignment_core.execution.cost import times

LOOK_SECONDS = 2.0
PROGRESS_SECONDS = 15.0
PATIENCE_SECONDS = 300.0
"""A crashed run that was not resumed for so long has ended."""
ENDS = {"COMPLETED": "completed", "FAILED": "failed", "CANCELLED": "cancelled"}
GONE_SECONDS = 10.0
"""Patience for services that are not running, and for a server that has never answered."""
RETRY_LATER = (408, 429)
"""Status codes of an overloaded server."""
Say = Callable[[str], None]


class _State(BaseModel):
    """The state of a run on the server."""

    model_config = ConfigDict(frozen=True)

    type: str
    name: str
    message: str | None = None


class _Run(BaseModel):
    """A run on the server."""

    model_config = ConfigDict(frozen=True)

    state: _State
    run_count: int
    deployment_id: str | None


class Ending(BaseModel):
    """The end of a run."""

    run_id: str
    status: str
    """``completed``, ``failed``, ``cancelled``, or ``crashed`` for good."""
    attempt: int
    message: str | None


def last() -> str:
    """The id of the latest run in this machine's journal or on the services' server, where it may not have begun yet. Raises
    UserError if there is none."""
    records = journal.runs()
    services.use_if_running()
    url = os.environ.get(access.URL)
    on_server = _last_on_server() if url else None
    if on_server is None:
        return journal.find(journal.LAST).run_id
    due, run_id = on_server
    elsewhere = [record for record in records if not access.same_server(record.server or "", url or "")]
    if elsewhere and datetime.fromisoformat(elsewhere[-1].started_at) > due:
        return elsewhere[-1].run_id
    return run_id


def _last_on_server() -> tuple[datetime, str] | None:
    """The due time and id of the latest due run on the server; None if there is none, or no answer."""
    chosen = {
        "flows": {"name": {"any_": [run_queue.FLOW]}},
        "flow_runs": {"expected_start_time": {"before_": datetime.now(UTC).isoformat()}},
    }
    latest_first = {"sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    with suppress(httpx.HTTPError), access.client() as client:
        answer = client.post("/flow_runs/filter", json={**chosen, **latest_first}).raise_for_status()
        for run in answer.json():
            return datetime.fromisoformat(run["expected_start_time"]), run["id"]
    return None


def follow(run_id: str, say: Say) -> Ending:
    """Wait for the end of a run, and report its states and stages. Raises EnvironmentFault if the run is unknown, if the server
    rejects this process, or if there is no server and the run does not continue without one."""
    stages = _Stages(run_id, say)
    states = _States(run_id, say)
    while True:
        services.use_if_running()
        ending = states.look()
        stages.look()  # after the state: a run writes its last stages down before it ends
        if ending is not None:
            return ending
        time.sleep(LOOK_SECONDS)


class _States:
    """Reports each state of a run, from its server or, for a run without one, from this machine's journal."""

    def __init__(self, run_id: str, say: Say) -> None:
        self._run_id = run_id
        self._say = say
        self._last_text = ""
        self._crashed_at: float | None = None
        self._away_since: float | None = None
        self._answered = False

    def look(self) -> Ending | None:
        """The ending of the run, once it has ended."""
        run, refused = None, None
        try:
            run = _read_run(self._run_id)
        except EnvironmentFault as error:
            refused = error
        if run is not None:
            self._away_since = None
            self._answered = True
            return self._on_server(run)
        record = _record(self._run_id)
        if record is not None and not record.deployed:
            return None if record.status == "running" and journal.is_alive(record) else _ended(record)
        if refused is not None:
            raise refused
        return self._wait_for_the_server(record)

    def _wait_for_the_server(self, record: journal.RunRecord | None) -> Ending | None:
        """Report the outage; return the ending if this machine's journal has it.

        Raises EnvironmentFault after a long outage during which no process of the run is alive.
        """
        url, now = os.environ.get(access.URL), time.monotonic()
        state = services.latest()
        of_services = url is not None and state is not None and access.same_server(state.url, url)
        gone = not url or (of_services and services.running() is None)
        patience = PATIENCE_SECONDS if self._answered and not gone else GONE_SECONDS
        outage = "no services are running" if gone else f"{url} does not answer"
        alive = record is not None and journal.is_alive(record)
        if gone and record is not None and record.status in ENDS.values():
            return _ended(record)
        self._report(f"{outage}; {'the run continues' if alive else f'waiting for {patience:g} s'}")
        self._away_since = None if alive else self._away_since or now
        if self._away_since is not None and now - self._away_since >= patience:
            status = f" (its status here is {journal.status_of(record)})" if record else ""
            raise EnvironmentFault(
                f"{outage}, so that nothing continues run {self._run_id}{status}: `align up` starts the services, and `align "
                "watch` follows it again"
            )
        return None

    def _on_server(self, run: _Run) -> Ending | None:
        state = run.state
        attempt = f", attempt {run.run_count}" if run.run_count > 1 else ""
        queue = run_queue.read() if state.type == "SCHEDULED" else None
        why = (queue.reason(self._run_id) if queue else None) or state.message
        if self._report(f"{state.name}{attempt}{': ' + why if why else ''}"):
            self._crashed_at = time.monotonic() if state.type == "CRASHED" else None
        status = ENDS.get(state.type)
        if self._crashed_at is not None:
            waited = time.monotonic() - self._crashed_at
            status = "crashed" if run.deployment_id is None or waited > PATIENCE_SECONDS else None
        if status is None:
            return None
        return Ending(run_id=self._run_id, status=status, attempt=run.run_count, message=state.message)

    def _report(self, text: str) -> bool:
        """Report a text that differs from the last one."""
        if text == self._last_text:
            return False
        self._last_text = text
        self._say(text)
        return True


def _read_run(run_id: str) -> _Run | None:
    """The run on the server; None during an outage. Raises EnvironmentFault for answers that waiting does not change."""
    url = os.environ.get(access.URL)
    if not url:
        return None
    try:
        answer = httpx.get(f"{url}/flow_runs/{run_id}", headers=access.headers(), timeout=10)
    except httpx.HTTPError:
        return None
    if answer.is_server_error or answer.status_code in RETRY_LATER:
        return None
    if answer.status_code in (401, 403):
        raise EnvironmentFault(
            f"{url} requires a token, and this shell has none or a different one; eval"
            ' "$(align env)" sets that of `align up`, PREFECT_API_AUTH_STRING that of another server'
        )
    if answer.status_code == 404:
        raise EnvironmentFault(f"unknown run {run_id}: {url} has no run with this id")
    try:
        return _Run.model_validate_json(answer.content)
    except ValidationError:
        problem = f"{url} answers {answer.status_code}, which is no answer of a Prefect server"
        raise EnvironmentFault(f"{problem}: is PREFECT_API_URL right? It ends in /api") from None


def _record(run_id: str) -> journal.RunRecord | None:
    """This machine's record of the run. Raises EnvironmentFault if there is none, and no server either."""
    try:
        return journal.read(run_id)
    except NotFound:
        if not os.environ.get(access.URL):
            unknown = f"no services run, and no run {run_id} was started here; `align up` starts them"
            raise EnvironmentFault(unknown) from None
        return None


def _ended(record: journal.RunRecord) -> Ending:
    """The ending of a run without automatic resumption."""
    status = "crashed" if record.status == "running" else record.status
    return Ending(run_id=record.run_id, status=status, attempt=record.attempt, message=record.error)


class _Stages:
    """Reports changes of a run's stages, from this machine's journal."""

    def __init__(self, run_id: str, say: Say) -> None:
        self._run_id = run_id
        self._say = say
        self._known: dict[str, tuple[str, str]] = {}
        self._restarts: dict[str, int] = {}
        self._progress_at = 0.0

    def look(self) -> None:
        lines = journal.stages(self._run_id)
        for label, line in lines.items():
            for sentence in line.restarts[self._restarts.get(label, 0) :]:
                self._say(f"{label}: {sentence}")
            self._restarts[label] = len(line.restarts)
            if self._known.get(label) != (line.state, line.at):
                self._known[label] = line.state, line.at
                seconds = f", {times(line.model_dump())}" if line.state == "run" else ""
                self._say(f"{label}: {line.state}{seconds}")
        if time.monotonic() - self._progress_at > PROGRESS_SECONDS:
            self._progress_at = time.monotonic()
            for label, progress in journal.progress(self._run_id).items():
                if label in lines and lines[label].state == "running":
                    self._say(f"{label}: {progress.text}")
