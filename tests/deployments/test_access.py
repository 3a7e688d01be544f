"""Who may talk to the server of `align up`, and who knows what: the token and the database's password."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sqlite3
import stat
from pathlib import Path

import psutil
import pytest
import sqlalchemy.exc

from alignment_core.recipes import ResourcesConfig
from flows import access
from flows import services as up
from tests.deployments.up import PASSWORD, Services
from tests.processes import processes_of


@pytest.mark.slow
def test_nobody_is_answered_without_the_token(services: Services) -> None:
    assert services.ask("/version").status_code == 401
    assert services.ask("/version", token="another").status_code == 401
    assert services.ask("/version", token=services.token).status_code == 200
    assert stat.S_IMODE((services.home / "services" / "token").stat().st_mode) == 0o600


@pytest.mark.slow
def test_no_page_of_another_origin_is_let_in(services: Services) -> None:
    asked = {"origin": "http://elsewhere.example"}
    assert "access-control-allow-origin" not in services.ask("/version", token=services.token, **asked).headers
    own = {"origin": f"http://localhost:{services.port}"}
    assert services.ask("/version", token=services.token, **own).headers["access-control-allow-origin"] == own["origin"]
    forged = {"prefect-csrf-client": "somebody", "prefect-csrf-token": "guessed"}
    assert services.ask("/deployments/filter", {}, services.token, **forged).status_code == 403


@pytest.mark.slow
def test_nobody_takes_the_port_of_a_server_that_died(services: Services) -> None:
    os.kill(services.pid("server"), signal.SIGKILL)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", services.port))
    assert services.get("/version")  # waits for the next one
    assert services.align("status")["services"]["services"][0]["restarts"] == 1


@pytest.mark.slow
def test_the_server_alone_knows_the_password_of_the_database(services: Services) -> None:
    server = psutil.Process(services.pid("server"))
    told = {server.pid, server.ppid()}
    for pid in processes_of(services.home):
        process = psutil.Process(pid)
        assert PASSWORD not in " ".join(process.cmdline())
        assert (PASSWORD in " ".join(process.environ().values())) == (pid in told), process.cmdline()


def test_what_runs_below_the_host_is_told_nothing_of_prefect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from alignment_core.host.client import _environment

    monkeypatch.setenv(access.TOKEN, "token")
    monkeypatch.setenv(access.DATABASE, "postgresql+asyncpg://align:password@host/name")
    told = _environment(ResourcesConfig(), tmp_path)
    assert not [name for name in told if name.startswith("PREFECT_")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    for name in (access.URL, access.TOKEN, access.DATABASE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "services").mkdir()
    return tmp_path


def test_a_stranger_at_the_address_of_services_that_ended_is_not_talked_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = up.State(pid=1, boot="", ticks=0, url=access.url_of(4200), database=up.SQLITE, phase="ready")
    (home / "services" / "state.json").write_text(state.model_dump_json())
    (home / "services" / "lock").touch()  # held by nobody
    monkeypatch.setenv(access.URL, access.url_of(4200))  # from a shell in which they ran
    monkeypatch.setenv(access.TOKEN, "token")
    up.use_if_running()
    assert access.URL not in os.environ
    assert access.TOKEN not in os.environ

    monkeypatch.setenv(access.URL, "http://server.example/api")
    monkeypatch.setenv(access.TOKEN, "of that server")
    up.use_if_running()
    assert os.environ[access.TOKEN] == "of that server"


def test_services_that_had_a_database_do_not_silently_begin_with_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_the_log_of_the_server_holds_no_transaction_that_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    from flows import prefect_server  # noqa: F401 (sets up the log)

    locked = sqlite3.OperationalError("database is locked")
    tasks = logging.getLogger("docket.dependencies")
    for error in (sqlalchemy.exc.OperationalError("UPDATE deployment", {}, locked), ValueError("wrong")):
        tasks.error("a task failed", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
