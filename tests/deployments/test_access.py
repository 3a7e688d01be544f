"""Access to the server of `align up`: the token and the database's password."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
import sqlalchemy.exc

from alignment.flows import access
from alignment.flows.service import services as up
from alignment.flows.service import supervisor
from alignment.flows.service.prefect_api import start_prefect_api
from alignment.flows.shipped_recipes import pool
from alignment_core.checks import rows
from alignment_core.data.pin import PinnedSource
from alignment_core.host import client
from alignment_core.recipes import DataConfig, DataSource, ResourcesConfig
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.tracking import wandb
from alignment_core.user_code import process as function_process
from tests.deployments.up import BIN, PASSWORD, Services
from tests.processes import processes_of, wait_until

REQUEST = httpx.Request("GET", "http://127.0.0.1:4200/api/version")


@pytest.mark.slow
def test_requests_without_the_token_are_refused(services: Services) -> None:
    assert services.ask("/version").status_code == 401
    assert services.ask("/version", token="another").status_code == 401
    assert services.ask("/version", token=services.token).status_code == 200
    assert stat.S_IMODE((services.home / "services" / "token").stat().st_mode) == 0o600


@pytest.mark.slow
def test_pages_of_another_origin_are_refused(services: Services) -> None:
    headers = {"origin": "http://elsewhere.example"}
    assert "access-control-allow-origin" not in services.ask("/version", token=services.token, **headers).headers
    own = {"origin": f"http://localhost:{services.port}"}
    assert services.ask("/version", token=services.token, **own).headers["access-control-allow-origin"] == own["origin"]
    forged = {"prefect-csrf-client": "somebody", "prefect-csrf-token": "guessed"}
    assert services.ask("/deployments/filter", {}, services.token, **forged).status_code == 403


@pytest.mark.slow
def test_the_port_of_a_dead_server_stays_reserved(services: Services) -> None:
    os.kill(services.pid("server"), signal.SIGKILL)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", services.port))
    assert services.get("/version")  # waits for the next one
    assert services.align("status")["services"]["services"][0]["restarts"] == 1


@pytest.mark.slow
def test_only_the_server_has_the_password_of_the_database(services: Services) -> None:
    server = psutil.Process(services.pid("server"))
    pids = {server.pid, server.ppid()}
    for pid in processes_of(services.home):
        process = psutil.Process(pid)
        assert PASSWORD not in " ".join(process.cmdline())
        assert (PASSWORD in " ".join(process.environ().values())) == (pid in pids), process.cmdline()


TELLS = """
import os, pathlib
variables = [name for name in os.environ if name.startswith("PREFECT_")]
(pathlib.Path(__file__).parent / f"variables-{os.getpid()}").write_text(" ".join(variables))
"""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process's environment, as in that of a user."""
    monkeypatch.setenv(access.URL, access.url_of(4200))
    monkeypatch.setenv(access.TOKEN, "token")
    monkeypatch.setenv(access.DATABASE, "postgresql+asyncpg://align:password@host/name")


@pytest.mark.usefixtures("secrets")
def test_processes_below_a_run_get_no_prefect_variables(tmp_path: Path) -> None:
    for environment in (client._environment(ResourcesConfig(), tmp_path), wandb._environment(tmp_path)):
        assert not [name for name in environment if name.startswith("PREFECT_")]


@pytest.mark.usefixtures("secrets")
def test_checks_before_a_run_get_no_prefect_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELLS)  # every Python process writes the Prefect variables that it has
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import os\ndef count(*_): return sum(name.startswith('PREFECT_') for name in os.environ)\n"
    )
    with function_process.FunctionProcess(f"{tmp_path / 'mine.py'}:count", 60.0, "evaluation.verifier") as process:
        assert list(process.answers([["prompt", "completion", "label"]])) == [(0, 0.0)]
    source = PinnedSource(source=DataSource(task="addition"))
    dataset = DatasetConfig(data=DataConfig(sources=[source.source]), sources=(source,), kind="prompts")
    question = rows.Question(label="data", dataset=dataset, tokenizer=rows.TokenizerSource())
    with closing(rows.ask([question])) as answers:
        assert next(answers).label == "data"
    assert [file.read_text() for file in tmp_path.glob("variables-*")] == ["", ""]


@pytest.mark.usefixtures("secrets")
def test_a_run_that_uses_a_server_drops_the_servers_database_variables() -> None:
    assert start_prefect_api() is None
    assert access.DATABASE not in os.environ
    assert os.environ[access.TOKEN] == "token"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    for name in (access.URL, access.TOKEN, access.DATABASE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "services").mkdir()
    return tmp_path


def killed_services(home: Path, port: int) -> None:
    """The files of services that were killed."""
    state = up.State(pid=1, started=1, boot="", url=access.url_of(port), database=up.SQLITE, phase="ready")
    (home / "services" / "state.json").write_text(state.model_dump_json())
    (home / "services" / "lock").touch()  # held by no process


def test_another_server_at_the_address_of_ended_services_gets_no_requests(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_services(home, 4200)
    first, later = up.new_token(), up.new_token()
    assert first != later
    for ours in (first, later):
        monkeypatch.setenv(access.URL, access.url_of(4200))  # from a shell in which they ran
        monkeypatch.setenv(access.TOKEN, ours)
        up.use_if_running()
        assert access.URL not in os.environ
        assert access.TOKEN not in os.environ


def test_the_token_of_another_homes_services_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have taken the port since."""
    killed_services(home, 4200)
    monkeypatch.setenv("ALIGN_HOME", str(home / "other"))
    other = up.new_token()
    monkeypatch.setenv("ALIGN_HOME", str(home))
    monkeypatch.setenv(access.URL, access.url_of(4200))
    monkeypatch.setenv(access.TOKEN, other)
    up.use_if_running()
    assert (os.environ[access.URL], os.environ[access.TOKEN]) == (access.url_of(4200), other)


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://server.example/api", "of that server"),
        (access.url_of(4200), "of a server of the user's own"),
        (access.url_of(4200), None),
    ],
)
def test_a_users_own_server_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch, url: str, token: str | None) -> None:
    killed_services(home, 4200)
    monkeypatch.setenv(access.URL, url)
    if token is not None:
        monkeypatch.setenv(access.TOKEN, token)
    up.use_if_running()
    assert (os.environ[access.URL], os.environ.get(access.TOKEN)) == (url, token)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_services_that_wait_for_their_port_are_not_ready(home: Path, taken: int) -> None:
    killed_services(home, taken)
    process = subprocess.Popen(up.command(taken), stdin=subprocess.DEVNULL, cwd="/", env=up.environment(taken))

    def waits() -> bool:
        state = up.running()
        return state is not None and (state.pid, state.phase) == (process.pid, "starting")

    try:
        assert wait_until(waits, 15)
        assert not up.token_file().exists()
    finally:
        process.kill()
        process.wait()


def test_folders_named_like_the_packages_are_not_imported(home: Path, taken: int, tmp_path: Path) -> None:
    for name in (
        "alignment/flows/service/supervisor.py",
        "alignment/flows/access.py",
        "alignment/tasks/stage.py",
    ):
        file = tmp_path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('not ours')")
    foreground = [str(BIN / "align"), "up", "--foreground", "--port", str(taken)]
    done = subprocess.run(foreground, cwd=tmp_path / "work", capture_output=True, text=True, check=False)
    assert (done.returncode, f"port {taken} is not free" in done.stdout + done.stderr) == (3, True), done.stderr

    for variables in (pool()["job_variables"]["env"], up.environment(taken)):
        environment = {**os.environ, **variables}
        ours = [sys.executable, "-c", "import alignment.flows.access, alignment.tasks.stage"]
        subprocess.run(ours, cwd=tmp_path / "work", env=environment, check=True)


def test_the_end_of_the_services_ends_the_runs_that_use_their_server(home: Path) -> None:
    holds = (
        "import signal, sys, time; from alignment_core.journal import Journal, new_record\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "run, server = sys.argv[1:]\n"
        "record = new_record(run, 'small', {'resources': {'stop_seconds': 5}}, 'store', server=server)\n"
        "try:\n"
        "    with Journal(record).open(): print('open', flush=True); sys.stdin.read()\n"
        "finally: time.sleep(0.5)\n"
    )
    ours = {"ours": access.url_of(4200), "spelled": "http://localhost:4200/api/"}
    servers = {**ours, "elsewhere": "http://server.example/api", "neighbour": access.url_of(4201), "older": ""}
    runs = {
        name: subprocess.Popen([sys.executable, "-c", holds, name, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name, url in servers.items()
    }
    try:
        for process in runs.values():
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
        supervisor._end_runs(access.url_of(4200))
        assert {runs[name].poll() for name in ours} == {143}, "it had no time to tell the server how it ended"
        assert {runs[name].poll() for name in servers.keys() - ours.keys()} == {None}
    finally:
        for process in runs.values():
            process.kill()
            process.communicate()


def test_services_do_not_silently_switch_to_another_database(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert up.database_settings(None) == {}
    (home / "services" / "database").write_text("postgresql+asyncpg://host/name")
    with pytest.raises(up.UserError, match=r"are in postgresql\+asyncpg://host/name; give its URL again"):
        up.database_settings(None)
    assert up.database_settings("sqlite") == {}
    url = "postgresql+asyncpg://align:password@host/name"
    assert up.database_settings(url) == {access.DATABASE: url}
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_TIMEOUT", "20")
    with pytest.raises(up.UserError, match="give its URL again"):
        up.database_settings(None)
    for name in (access.OLDER_DATABASE, access.DATABASE):
        monkeypatch.setenv(name, url)
        assert access.shown_database(up.database_settings(None)) == "postgresql+asyncpg://host/name"
    assert not {name for name in up.environment(4200) if name.startswith(access.OF_DATABASE)}


@pytest.mark.slow
def test_the_log_of_the_server_has_no_retried_transactions(caplog: pytest.LogCaptureFixture) -> None:
    from alignment.flows.service import prefect_server  # noqa: F401 (sets up the log)

    locked = sqlite3.OperationalError("database is locked")
    tasks = logging.getLogger("docket.dependencies")
    for error in (sqlalchemy.exc.OperationalError("UPDATE deployment", {}, locked), ValueError("wrong")):
        tasks.error("a task failed", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


def answer(status: int, url: str) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(str(status), request=httpx.Request("GET", url), response=httpx.Response(status))


HERE, ELSEWHERE = "http://127.0.0.1:4200/api/flows", "https://elsewhere.example/api"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (answer(401, HERE), "no longer accepts this run's token"),
        (httpx.ConnectError("refused", request=httpx.Request("GET", HERE)), "no longer answers"),
        (answer(404, HERE), None),
        (answer(401, ELSEWHERE), None),
        (httpx.ConnectError("refused", request=httpx.Request("GET", ELSEWHERE)), None),
        (httpx.ConnectError("refused"), None),
        (ValueError("401"), None),
    ],
    ids=[
        "another token",
        "away",
        "not found",
        "refused elsewhere",
        "away elsewhere",
        "nobody knows where",
        "another error",
    ],
)
def test_a_run_that_lost_its_server_names_the_cause_and_how_to_resume(
    error: Exception, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in access.of_client("http://127.0.0.1:4200/api", "token").items():
        monkeypatch.setenv(name, value)
    wrapped = RuntimeError("the state was not set")
    wrapped.__cause__ = error
    fault = access.lost_server(wrapped)
    assert fault == access.lost_server(error)
    assert fault is None if sentence is None else sentence in str(fault) and "`align resume last`" in str(fault)
