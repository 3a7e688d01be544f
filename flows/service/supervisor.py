"""The background process of ``align up``, ``python -m alignment.flows.service.supervisor PORT``: it keeps all services running.

It holds the server's port for its whole life, so that no other process can answer there while the server is down. It reads the
variables of the database from standard input, and gives them to the server only. When it ends, in any way, everything below it
ends; active runs save their progress first, and continue when the services start again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from alignment.flows import access
from alignment.flows.console import say
from alignment.flows.run_queue import POOL
from alignment.flows.service.prefect_api import server_command, wait_until_healthy
from alignment.flows.service.prefect_worker import TEMPORARY
from alignment.flows.service.services import (
    SQLITE,
    START_SECONDS,
    ServiceState,
    State,
    database_file,
    folder,
    latest,
    log_of,
    new_token,
    password_file,
    token_file,
)
from alignment_core import journal
from alignment_core.errors import AlignmentError, EnvironmentFault
from alignment_core.files import write_whole
from alignment_core.home import align_home
from alignment_core.host.subprocess_tree import Supervised, fresh_folder
from alignment_core.processes import ProcessId, lock, wait_until

RUN_SECONDS = 60.0
"""Time for the worker's runs to save their progress when the services stop."""
REPORT_SECONDS = 30.0
"""Time for a stopped run to report its state to the server."""
RETRY_SECONDS = 5.0
"""Pause between attempts to start a service that the machine refuses."""
PORT_SECONDS = 20.0
"""Time for which the server of killed services may still hold the port."""
LONGEST_LOG_BYTES = 64 << 20


def trim(log: Path) -> None:
    """Truncate a long log, whose service continues to append to the same file.

    A copy is kept beside it, unless the disk is full.
    """
    if log.exists() and log.stat().st_size > LONGEST_LOG_BYTES:
        old = log.with_suffix(".old.log")
        try:
            shutil.copyfile(log, old)
        except OSError:
            old.unlink(missing_ok=True)
        os.truncate(log, 0)


@dataclass
class _Service:
    """A command that its supervisor restarts when it ends; processes that it started keep running beside it."""

    name: str
    command: list[str]
    grace: float = 10.0
    orphan_grace: float = 0.0
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables for this service only."""
    inherited: Sequence[int] = ()
    """Open file descriptors."""
    _supervised: Supervised | None = None
    _earlier_restarts: int = 0
    """Restarts under supervisors that have ended, and of supervisors."""
    _again_at: float = 0.0

    def begin(self) -> None:
        temporary = fresh_folder(align_home() / "tmp", "s-")
        self._supervised = Supervised(
            self.command,
            {**os.environ, **self.secrets, TEMPORARY: str(temporary)},
            log_of(self.name),
            temporary,
            inherited=self.inherited,
            grace=self.grace,
            orphan_grace=self.orphan_grace,
            restart=True,
        )

    def keep_running(self) -> None:
        """Start the supervisor again if it was killed; truncate a long log.

        Failures of the machine, such as a full disk, are retried later.
        """
        with suppress(OSError):
            trim(log_of(self.name))
        if self._supervised is not None and self._supervised.process.poll() is not None:
            say(f"the supervisor of {self.name} has ended")
            self._earlier_restarts += self._supervised.restarts
            self._supervised.close()
            self._supervised = None
        if self._supervised is None and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + RETRY_SECONDS
            try:
                self.begin()
                self._earlier_restarts += 1
            except OSError as error:
                say(f"{self.name} does not start: {error}; the next try is in {RETRY_SECONDS:g} s")

    def close(self) -> None:
        if self._supervised is not None:
            self._supervised.close()

    @property
    def restarts(self) -> int:
        return self._earlier_restarts + (self._supervised.restarts if self._supervised else 0)

    @property
    def failed(self) -> bool:
        """Whether it has ended since it began."""
        return self._supervised is None or self._supervised.process.poll() is not None or self.restarts > 0

    @property
    def state(self) -> ServiceState:
        pid = self._supervised.process.pid if self._supervised else None
        return ServiceState(name=self.name, pid=pid, restarts=self.restarts)


class Services:
    """The server, the worker, the reconciler and the pages of `align ui`."""

    def __init__(self, port: int, database: Mapping[str, str]) -> None:
        self.port = port
        self.url = access.url_of(port)
        self.database = access.shown_database(database) or f"{SQLITE}, {align_home() / 'prefect' / 'prefect.db'}"
        self._database_variables = database
        self.services: tuple[_Service, ...] = ()
        self.problems: dict[str, str] = {}
        self.max_runs: int | None = None
        self.stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._pages_listener: socket.socket | None = None
        self._written: State | None = None

    def run(self) -> None:
        """Start the services in order and keep them running until ``stopping`` is set. Raises EnvironmentFault if the
        start fails."""
        patience = PORT_SECONDS if _were_killed_at(self.url) else 0.0
        earlier = state.pages if (state := latest()) else ""
        token_file().unlink(missing_ok=True)  # of earlier services; waiting for the port may take a while
        self._write("starting")
        self._listener = _listen(self.port, patience)
        token = new_token()
        access.write(token_file(), token)
        os.environ.update(access.of_client(self.url, token))
        fd = self._listener.fileno()
        secrets = {
            **self._database_variables,
            **access.of_server(self.port, token),
            **access.OF_PAGES,
            access.PASSWORD: access.password(password_file()),
        }
        server = _Service("server", server_command(fd, "warning"), secrets=secrets, inherited=[fd])
        worker_command = [sys.executable, "-m", "alignment.flows.service.prefect_worker", "--pool", POOL]
        worker = _Service("worker", worker_command, RUN_SECONDS, RUN_SECONDS)
        reconciler = _Service("reconciler", [sys.executable, "-m", "alignment.flows.service.reconcile"])
        self._pages_listener = _listen_again(earlier)
        pages_fd = self._pages_listener.fileno()
        pages_command = [sys.executable, "-m", "alignment.flows.ui.server", str(pages_fd)]
        pages = _Service("pages", pages_command, inherited=[pages_fd])
        self.services = (server, worker, reconciler, pages)
        self._write("starting")
        server.begin()
        self._write("starting")
        if wait_until_healthy(self.url, START_SECONDS, lambda: server.failed or self.stopping.is_set()):
            self._register()
        elif not self.stopping.is_set():
            raise EnvironmentFault(f"the Prefect server did not start; see {log_of('server')}")
        if self.stopping.is_set():
            return
        worker.begin()
        reconciler.begin()
        pages.begin()
        database_file().write_text(self.database)
        self._write("ready")
        say(f"ready: {self.url}")
        while not self.stopping.wait(0.5):
            for service in self.services:
                service.keep_running()
            self._write("ready")

    def close(self, error: str | None = None) -> None:
        """Stop the services in order. The reconciler goes first, as it would resume the stopped runs. Then the runs save their
        progress and report to the server, before the worker, whose end kills its runs, and the server."""
        self._write("stopping", error)
        if self.services:
            server, worker, reconciler, pages = self.services
            pages.close()
            reconciler.close()
            _end_runs(self.url)
            worker.close()
            server.close()
            token_file().unlink(missing_ok=True)
        self._write("failed" if error else "stopped", error)

    def _register(self) -> None:
        """Register the installed deployments, unless ``stopping`` is set meanwhile. Raises EnvironmentFault."""
        log = log_of("registration")
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "alignment.flows.deployments", POOL]
        registration = Supervised(command, os.environ, log, fresh_folder(align_home() / "tmp", "s-"))
        try:
            while registration.process.poll() is None:
                if self.stopping.wait(0.1):
                    return
        finally:
            registration.close()
        output = log.read_text()
        if registration.process.returncode:
            raise EnvironmentFault(f"the deployments were not registered: {output[-500:]}")
        self.max_runs, self.problems = _answer_of(output)
        for name, problem in self.problems.items():
            say(f"the deployment {name} cannot run: {problem}")

    def _write(self, phase: str, error: str | None = None) -> None:
        state = State(
            **ProcessId.mine().model_dump(),
            url=self.url,
            pages=_address_of(self._pages_listener),
            database=self.database,
            phase=phase,
            services=tuple(service.state for service in self.services),
            problems=self.problems,
            max_runs=self.max_runs,
            error=error,
        )
        if state != self._written:
            with suppress(OSError):  # a full disk: the next call writes it
                content = state.model_dump_json(indent=2).encode()
                write_whole(folder() / "state.json", lambda file: file.write(content))
                self._written = state


def _answer_of(output: str) -> tuple[int, dict[str, str]]:
    """The pool's concurrency limit, and why deployments cannot run, by name: printed by the registration among its logs."""
    answer = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith('{"max_runs"')))
    return answer["max_runs"], answer["problems"]


def _end_runs(url: str) -> None:
    """Stop every run of the worker, and every other run that uses this server, after it has saved its progress."""
    records = [
        record
        for record in journal.runs()
        if (record.deployed or access.same_server(record.server, url)) and journal.is_alive(record)
    ]
    with ThreadPoolExecutor(max_workers=max(len(records), 1)) as pool:  # all at once: each may take minutes
        list(pool.map(_end_run, records))


def _end_run(record: journal.RunRecord) -> None:
    try:
        journal.end_process(record, journal.stop_seconds(record))
    except AlignmentError as error:
        say(str(error))
    wait_until(lambda: not record.lives(), REPORT_SECONDS)  # it reports its state to the server


def _were_killed_at(url: str) -> bool:
    """Whether earlier services at this address were killed."""
    state = latest()
    return state is not None and state.url == url and state.phase in ("starting", "ready")


def _listen(port: int, patience: float) -> socket.socket:
    """Bind the server's port. Raises EnvironmentFault if it is still taken after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError as error:
            if time.monotonic() >= deadline:
                reason = f"port {port} is not free ({os.strerror(error.errno or 0)})"
                raise EnvironmentFault(f"{reason}; choose another one with --port") from None
            time.sleep(0.5)


def _listen_again(address: str) -> socket.socket:
    """A port for the pages: that of an earlier address, which people may have kept, or a free one."""
    with suppress(OSError, ValueError):
        return socket.create_server(("127.0.0.1", urlsplit(address).port or 0))
    return socket.create_server(("127.0.0.1", 0))


def _address_of(listener: socket.socket | None) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}/" if listener else ""


def main() -> int:
    """Entry point of the background process."""
    database = json.loads(sys.stdin.read() or "{}")
    lock_file = (folder() / "lock").open("ab")  # open, and so locked, until this process ends
    if not lock(lock_file):
        say("other services of this ALIGN_HOME are already running")
        return EnvironmentFault.exit_code
    services = Services(int(sys.argv[1]), database)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: services.stopping.set())
    error: str | None = None
    try:
        services.run()
    except (AlignmentError, OSError) as failure:
        error = str(failure)
        say(error)
    services.close(error)
    return EnvironmentFault.exit_code if error else 0


if __name__ == "__main__":
    sys.exit(main())
