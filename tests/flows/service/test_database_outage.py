"""An outage of the database of Prefect's server: clients retry, and no run ends with the worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import httpx
import psutil
import pytest
import sqlalchemy.exc
from docket import Docket, Perpetual, Retry, Worker
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prefect.states import Running

from alignment.flows.service import prefect_worker, retry_503
from alignment.flows.service.reconcile import EVERY_SECONDS, OUTAGE_SECONDS, SILENCE_SECONDS, Reconciler
from alignment_core.host.subprocess_tree import Supervised, fresh_folder
from tests.flows.service.test_reconcile import Server
from tests.processes import wait_until

AWAY = [
    ConnectionRefusedError(111, "Connection refused"),
    OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"),
    TimeoutError(),
    asyncpg.CannotConnectNowError("the database system is starting up"),
    asyncpg.AdminShutdownError("terminating connection due to administrator command"),
    asyncpg.TooManyConnectionsError("sorry, too many clients already"),
    asyncpg.InterfaceError("cannot perform operation: connection is closed"),
    sqlalchemy.exc.TimeoutError("QueuePool limit reached"),
    sqlalchemy.exc.DBAPIError("SELECT 1", {}, Exception("connection was closed"), connection_invalidated=True),
    ExceptionGroup("of a middleware", [ConnectionRefusedError(111, "Connection refused")]),
]


@pytest.fixture
def prefect_server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Prefect's module, whose function and log are as before after the test."""
    from prefect.server.api import server

    monkeypatch.setattr(server, "is_client_retryable_exception", server.is_client_retryable_exception)
    for name in retry_503.LOGS_OF_OUTAGES:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    return server


@pytest.mark.slow
@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_an_unavailable_database_is_answered_with_503(error: Exception, prefect_server: ModuleType) -> None:
    """503, which Prefect's clients retry; with 500 they give up (HTTP: RFC 9110, 15.6.4)."""
    retry_503.answer_503(FastAPI())

    def status(raised: Exception) -> int:
        answer: JSONResponse = asyncio.run(prefect_server.custom_internal_exception_handler(None, raised))
        return answer.status_code

    assert status(error) == 503
    assert status(KeyError("a bug")) == 500
    assert status(asyncpg.InvalidPasswordError("wrong password")) == 500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status"),
    [
        *((error, 503) for error in AWAY),
        (KeyError("a bug"), 500),
        (asyncpg.InvalidPasswordError("wrong password"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.usefixtures("prefect_server")
def test_database_errors_in_middlewares_are_answered_with_503(
    method: str, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a middleware, as Prefect's check of CSRF tokens is one."""
    monkeypatch.setattr(retry_503, "PAUSES", (0.0,))
    application = FastAPI()

    @application.middleware("http")
    async def failing(_request: Request, _call_next: object) -> Response:
        raise error

    retry_503.answer_503(application)

    async def ask() -> httpx.Response:
        wrapped = retry_503.Retry503(application)
        transport: Any = httpx.ASGITransport(app=wrapped, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, "/api/flow_runs/filter")

    assert asyncio.run(ask()).status_code == status


def test_an_outage_is_a_single_line_in_the_log_without_tracebacks(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("test_an_outage")
    log.addFilter(retry_503.OutageFilter())
    for error in (*AWAY, KeyError("a bug")):
        log.error("Exception in ASGI application", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "the database does not answer: ConnectionRefusedError: [Errno 111] Connection refused; clients retry"
    )


@pytest.mark.usefixtures("prefect_server")
def test_an_outage_is_a_single_line_for_requests_and_background_tasks_together(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real perpetual task of docket, the library of Prefect's background tasks, with and without retries."""
    errors: list[Exception] = []

    async def monitor(perpetual: Perpetual = Perpetual(every=timedelta(milliseconds=5))) -> None:  # noqa: B008 (docket reads it)
        if len(errors) == len(AWAY) + 1:
            perpetual.cancel()
            return
        errors.append([*AWAY, KeyError("a bug")][len(errors)])
        raise errors[-1]

    async def cleanup(retry: Retry = Retry(attempts=2, delay=timedelta(0))) -> None:  # noqa: B008
        raise AWAY[0]

    async def work() -> None:
        async with Docket(name="outage", url="memory://") as docket, Worker(docket) as worker:
            await docket.add(cleanup)()
            await docket.add(monitor)()
            await worker.run_until_finished()

    retry_503.answer_503(FastAPI())
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=AWAY[0])
    asyncio.run(work())
    assert errors[-1].args == ("a bug",)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
    assert len(capsys.readouterr().out.splitlines()) == 1


RUN = "import sys, time; from pathlib import Path; Path(sys.argv[1]).touch(); time.sleep(600)"
WORKER = """
import os, subprocess, sys
from pathlib import Path
starts, run = Path(sys.argv[1]), sys.argv[2]
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
if len(starts.read_text().split()) == 1:
    child = subprocess.Popen([sys.executable, "-c", run, str(starts.with_suffix(".run"))])
    starts.with_suffix(".pid").write_text(str(child.pid))
    while not starts.with_suffix(".run").exists():
        pass
    sys.exit(1)
import time
time.sleep(600)
"""


def test_a_worker_that_exits_is_started_again_and_its_run_keeps_running(tmp_path: Path) -> None:
    """The supervisor leaves nothing behind at its end: only its own end ends the run."""
    starts = tmp_path / "starts"
    command = [sys.executable, "-c", WORKER, str(starts), RUN]
    supervised = Supervised(command, dict(os.environ), tmp_path / "log", fresh_folder(tmp_path, "s-"), restart=True)
    try:
        assert wait_until(lambda: starts.exists() and len(starts.read_text().split()) == 2, 30)
        assert wait_until(lambda: supervised.restarts == 1, 10)
        run = psutil.Process(int(starts.with_suffix(".pid").read_text()))
        assert run.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    finally:
        supervised.close()
    assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("ending", "exits"),
    [(RuntimeError("Service exceeded error threshold."), True), (asyncio.CancelledError(), False), (None, False)],
    ids=["an error", "a signal", "in order"],
)
def test_a_worker_with_an_error_exits_before_prefect_ends_its_runs(
    ending: BaseException | None, exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.workers.process import ProcessWorker

    happened: list[str] = []

    async def leave(*_: object) -> None:
        happened.append("its runs are ended")

    def gone(code: int) -> None:
        happened.append(f"exit {code}")
        raise SystemExit(code)

    monkeypatch.setattr(ProcessWorker, "__aexit__", leave)
    monkeypatch.setattr(prefect_worker.os, "_exit", gone)
    prefect_worker._keep_runs_on_errors()
    call: Callable[..., object] = ProcessWorker.__aexit__
    with contextlib.suppress(SystemExit):
        asyncio.run(call(None, type(ending) if ending else None, ending, None))  # type: ignore[arg-type]
    assert happened == (["exit 1"] if exits else ["its runs are ended"])


class Away(Server):
    """Answers the first question about runs only after an outage, as Prefect's client sees it."""

    outage = 0.0

    def read_flow_runs(self, *arguments: object, **options: object) -> list[object]:  # type: ignore[override]
        self.clock, self.outage = self.clock + self.outage, 0.0
        return super().read_flow_runs(*arguments, **options)  # type: ignore[return-value, arg-type]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("raised", [False, True], ids=["the client waits", "the client gives up"])
def test_an_outage_does_not_count_as_silence_of_a_run_elsewhere(raised: bool) -> None:
    """Runs of other machines are dead after 120 s without a heartbeat; none arrives while the server is away."""
    server = Away(Running(), deployed=False)
    reconciler = Reconciler(lambda: server.clock)
    assert server.looked_at(reconciler, 30) == []
    if raised:
        server.clock += 2 * SILENCE_SECONDS
        reconciler.outage()
    else:
        server.outage = 2 * SILENCE_SECONDS
        assert server.outage > OUTAGE_SECONDS
    assert server.looked_at(reconciler, SILENCE_SECONDS - EVERY_SECONDS) == []
    assert server.looked_at(reconciler, 4 * EVERY_SECONDS) == ["crashed"], "silent since the end of the outage"
