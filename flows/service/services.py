"""The services of ``align up`` for other processes: start, state, settings of clients, stop."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from alignment.flows import access
from alignment.flows.service.environment import at_home
from alignment_core import journal
from alignment_core.artifacts.os_errors import check_room, explained
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.home import align_home
from alignment_core.processes import SAFE_PATH, ProcessId, is_locked, wait_until

SQLITE = "sqlite"
START_SECONDS = 180.0
STOP_SECONDS = 120.0
"""Time for the services to stop, beside the time for the runs to save their progress."""
LEAST_FREE_BYTES = 8 << 20
"""Free disk space that a start needs, for the database and the logs."""


class ServiceState(BaseModel):
    """One service as ``align status`` shows it."""

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int | None
    restarts: int = 0


class State(ProcessId):
    """The state file of the background process."""

    url: str
    pages: str = ""
    """Address of the pages of `align ui`; empty before their port is known."""
    database: str
    """Without its password."""
    phase: str
    """``starting``, ``ready``, ``stopping``, ``stopped`` or ``failed``."""
    services: tuple[ServiceState, ...] = ()
    problems: dict[str, str] = {}
    """Reasons why deployments cannot run, by deployment."""
    max_runs: int | None = None
    """Concurrency limit of the work pool when the services became ready."""
    error: str | None = None


def folder() -> Path:
    """The folder with the lock, the state and the logs of the services."""
    return align_home() / "services"


def log_of(service: str) -> Path:
    """The log file of a service."""
    return folder() / f"{service}.log"


def token_file() -> Path:
    """The file with the server's token (see :mod:`alignment.flows.access`) while the background process lives."""
    return folder() / "token"


def password_file() -> Path:
    """The file with the password for the server's pages."""
    return folder() / "password"


def new_token() -> str:
    """A token that begins with the mark of this ALIGN_HOME: see :func:`use_if_running`."""
    return _mark() + access.new_token()


def _mark() -> str:
    return hashlib.sha256(str(align_home().resolve()).encode()).hexdigest()[:16] + "-"


def running() -> State | None:
    """The state of the services of this ALIGN_HOME; None if their process is dead."""
    state = latest()
    with suppress(OSError):
        return state if is_locked(folder() / "lock") else None
    return None


def latest() -> State | None:
    """The state of the last background process of this ALIGN_HOME, alive or dead."""
    with suppress(OSError, ValidationError):
        return State.model_validate_json((folder() / "state.json").read_text())
    return None


def use_if_running() -> None:
    """Set the variables of the services' server in this process, unless the user has named another server.

    If the services are down, a process that listens at their address is not ours: this process drops the address if its
    token is one of ours. A server of the user's own at the same address has another token, or none.
    """
    last, url = latest(), os.environ.get(access.URL)
    if last is None or url not in (None, last.url):
        return
    state, token = running(), access.read(token_file())
    if state is not None and state.phase == "ready" and token is not None:
        os.environ.update(access.of_client(state.url, token))
    elif os.environ.get(access.TOKEN, "").startswith(_mark()):
        for name in access.of_client("", ""):
            os.environ.pop(name, None)


def environment(port: int) -> dict[str, str]:
    """The environment of the services, without that of the database, which only the server gets. The user's settings win.

    Services and runs import nothing from their working folder, which may have folders named like our packages.
    """
    settings = {
        **at_home(),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # otherwise the database grows forever
    }
    users, _ = access.split(os.environ)
    own = {access.URL: access.url_of(port), "ALIGN_HOME": str(align_home()), **SAFE_PATH}
    return {**settings, **users, **own}


def database_settings(url: str | None) -> dict[str, str]:
    """The server's variables for the database. Raises UserError if the services have used another one.

    ``url`` may be ``sqlite``, for a file below ALIGN_HOME; None leaves the choice to the user's environment.
    """
    _, settings = access.split(os.environ)
    if url == SQLITE:
        return {}
    if url is not None:
        settings = {**settings, access.DATABASE: url}
    before = database_file().read_text() if database_file().exists() else SQLITE
    if access.shown_database(settings) is None and not before.startswith(SQLITE):
        raise UserError(
            f"the runs of these services are in {before}; give its URL again, as {access.DATABASE} or with --database, "
            f"or start afresh with --database {SQLITE}"
        )
    return settings


def database_file() -> Path:
    """The file with the last database of the services, without its password."""
    return folder() / "database"


def command(port: int) -> list[str]:
    """The command of the background process."""
    return [sys.executable, "-m", "alignment.flows.service.supervisor", str(port)]


def _prepare() -> None:
    with explained("create", folder()):
        folder().mkdir(parents=True, exist_ok=True)
    check_room(folder(), LEAST_FREE_BYTES, "Prefect's server")


def start(port: int, database: str | None) -> State:
    """Start the background process and wait until all services are ready. Raises EnvironmentFault with the reason if not."""
    settings = database_settings(database)
    _prepare()
    log = log_of("services")
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(port),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=environment(port),
        )
    try:
        return _when_ready(process, settings, log)
    except BaseException:  # Ctrl-C and SIGTERM, too: they do not reach the process, which has a session of its own
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        raise


def _when_ready(process: subprocess.Popen[bytes], settings: Mapping[str, str], log: Path) -> State:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it has ended, and its state has the reason
        process.stdin.write(json.dumps(settings).encode())
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        state = running()
        if state and state.pid == process.pid and state.phase == "ready":
            return state
        if process.poll() is not None:
            state = latest()
            reason = state.error if state and state.pid == process.pid and state.error else "it ended at once"
            raise EnvironmentFault(f"the services did not start: {reason}; see {log}")
        time.sleep(0.1)
    raise EnvironmentFault(f"the services did not start within {START_SECONDS:g} seconds; see {log}")


def become(port: int, database: str | None) -> NoReturn:
    """Replace this process by the background process, for service managers that expect a foreground process."""
    settings = database_settings(database)
    _prepare()
    reads, writes = os.pipe()
    os.write(writes, json.dumps(settings).encode())
    os.close(writes)
    os.dup2(reads, 0)
    inherited = environment(port)
    os.chdir("/")
    os.execve(sys.executable, command(port), inherited)


def stop(state: State) -> None:
    """Stop the background process and wait for its end. Raises EnvironmentFault if it does not end."""
    process = state.find()
    runs = [journal.stop_seconds(record) for record in journal.runs() if journal.is_alive(record)]
    seconds = STOP_SECONDS + max(runs, default=0.0)
    if process is not None:
        process.terminate()
    if not wait_until(lambda: running() is None, seconds):
        raise EnvironmentFault(f"process {state.pid} did not end within {seconds:g} seconds; end it by hand")
