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
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from alignment.flows import access
from alignment.flows.console import say
from alignment.flows.run_queue import POOL
from alignment.flows.service.prefect_api import answers, server_command
from alignment.flows.service.prefect_worker import TEMPORARY
from alignment.flows.service.services import (
    SQLITE,
    START_SECONDS,
    ServiceState,
    State,
    database_file,
    folder,
    issue,
    latest,
    log_of,
    password_file,
    stop_seconds,
    token_file,
)
from alignment_core import journal
from alignment_core.errors import AlignmentError, EnvironmentFault
from alignment_core.home import align_home
from alignment_core.host.subprocess_tree import Supervised, fresh_folder
from alignment_core.processes import ProcessId, lock

RUN_SECONDS = 60.0
"""Time for the worker's runs to save their progress when the services stop."""
REPORT_SECONDS = 30.0
"""Time for a stopped run to report its state to the server."""
LONGEST_BACKOFF_SECONDS = 60.0
HEALTHY_SECONDS = 60.0
"""After so long a life, a service restarts with the shortest pause again."""
PORT_SECONDS = 20.0
"""How long the server of killed services may still hold the port."""
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


class _Service:
    """A command that is restarted when it ends."""

    def __init__(
        self,
        name: str,
        command: list[str],
        grace: float = 10.0,
        orphan_grace: float = 0.0,
        secrets: Mapping[str, str] = {},
        inherited: Sequence[int] = (),
        restart: bool = False,
    ) -> None:
        """``secrets`` are variables for this service only; ``inherited`` are open file descriptors. With ``restart``, processes
        that the service started survive its own end, and it is restarted beside them."""
        self.name = name
        self.command = command
        self.grace = grace
        self.orphan_grace = orphan_grace
        self.secrets = secrets
        self.inherited = inherited
        self.restart = restart
        self._restarts = 0
        self._pause = 0.5
        self._again_at = 0.0
        self._running: Supervised | None = None

    def begin(self) -> None:
        temporary = fresh_folder(align_home() / "tmp", "s-")
        log = log_of(self.name)
        self._running = Supervised(
            self.command,
            {**os.environ, **self.secrets, TEMPORARY: str(temporary)},
            log,
            temporary,
            inherited=self.inherited,
            grace=self.grace,
            orphan_grace=self.orphan_grace,
            restart=self.restart,
        )
        self._began = time.monotonic()

    def keep_running(self) -> None:
        """Restart the command if it has ended, after a pause that doubles with each failure; truncate a long log.

        Failures of the machine, such as a full disk, are retried later.
        """
        with suppress(OSError):
            trim(log_of(self.name))
        if self._running is not None and self._running.process.poll() is not None:
            self._restarts += self._running.restarts
            self._running.close()
            self._running = None
            if time.monotonic() - self._began > HEALTHY_SECONDS:
                self._pause = 0.5
            self._schedule_restart("ended")
        if self._running is None and time.monotonic() >= self._again_at:
            try:
                self.begin()
            except OSError as error:
                self._schedule_restart(f"does not start: {error}")
            else:
                self._restarts += 1

    def _schedule_restart(self, reason: str) -> None:
        self._pause = min(self._pause * 2, LONGEST_BACKOFF_SECONDS)
        self._again_at = time.monotonic() + self._pause
        say(f"{self.name} {reason}; it restarts in {self._pause:g} s")

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    @property
    def restarts(self) -> int:
        """Number of restarts, by the subprocess's own supervisor and by this process."""
        return self._restarts + (self._running.restarts if self._running else 0)

    @property
    def state(self) -> ServiceState:
        pid = self._running.process.pid if self._running else None
        return ServiceState(name=self.name, pid=pid, restarts=self.restarts)


class Services:
    """The server, the worker and the reconciler."""

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
        self._written: State | None = None

    def run(self) -> None:
        """Start the services in order and keep them running until ``stopping`` is set. Raises EnvironmentFault if the
        start fails."""
        patience = PORT_SECONDS if _were_killed_at(self.url) else 0.0
        token_file().unlink(missing_ok=True)  # of earlier services; waiting for the port may take a while
        self._write("starting")
        self._listener = _listen(self.port, patience)
        token = access.new_token()
        issue(token)
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
        worker = _Service("worker", worker_command, RUN_SECONDS, RUN_SECONDS, restart=True)
        reconciler = _Service("reconciler", [sys.executable, "-m", "alignment.flows.service.reconcile"])
        self.services = (server, worker, reconciler)
        self._write("starting")
        server.begin()
        self._write("starting")
        self._wait_for_server(server)
        self.max_runs, self.problems = _register()
        if self.stopping.is_set():
            return
        worker.begin()
        reconciler.begin()
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
            server, worker, reconciler = self.services
            reconciler.close()
            _end_runs(self.url)
            worker.close()
            server.close()
            token_file().unlink(missing_ok=True)
        self._write("failed" if error else "stopped", error)

    def _wait_for_server(self, server: _Service) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.stopping.is_set():
            if answers(self.url, 5):
                return
            process = server._running
            if process is None or process.process.poll() is not None or time.monotonic() > deadline:
                raise EnvironmentFault(f"the Prefect server did not start; see {log_of('server')}")
            time.sleep(0.2)

    def _write(self, phase: str, error: str | None = None) -> None:
        state = State(
            **ProcessId.mine().model_dump(),
            url=self.url,
            database=self.database,
            phase=phase,
            services=tuple(service.state for service in self.services),
            problems=self.problems,
            max_runs=self.max_runs,
            error=error,
        )
        if state != self._written:
            with suppress(OSError):  # a full disk: the next call writes it
                partial = folder() / "state.partial"
                partial.write_text(state.model_dump_json(indent=2))
                os.replace(partial, folder() / "state.json")
                self._written = state


def _register() -> tuple[int, dict[str, str]]:
    """Register the installed deployments. Returns the pool's concurrency limit, and why deployments cannot run, by name."""
    command = [sys.executable, "-m", "alignment.flows.deployments", POOL]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"the deployments were not registered: {(done.stderr or done.stdout)[-500:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    problems: dict[str, str] = answer["problems"]
    for name, problem in problems.items():
        say(f"the deployment {name} cannot run: {problem}")
    return answer["max_runs"], problems


def _end_runs(url: str) -> None:
    """Stop every run of the worker, and every other run that uses this server, after it has saved its progress."""
    threads = [
        threading.Thread(target=_end_run, args=(record,))
        for record in journal.runs()
        if (record.deployed or access.same_server(record.server, url)) and journal.is_alive(record)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_run(record: journal.RunRecord) -> None:
    try:
        journal.end_process(record, stop_seconds(record.recipe))
    except AlignmentError as error:
        say(str(error))
    deadline = time.monotonic() + REPORT_SECONDS
    while _lives(record) and time.monotonic() < deadline:  # it reports its state to the server
        time.sleep(0.1)


def _lives(record: journal.RunRecord) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = record.find()
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    return False


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
