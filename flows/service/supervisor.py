"""The process behind ``align up``, ``python -m alignment.flows.service.supervisor PORT``: it keeps all services running.

It holds the server's port as long as it lives: whatever becomes of the server, nobody else can answer there. What it must
know of the database it reads from its standard input, and tells the server alone. Its end, in any way, ends everything
below it; runs that are under way save their work first and go on when the services are started again.
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
"""What a worker's runs have to save their work when the services are stopped."""
TELL_SECONDS = 30.0
"""What a run that has saved its work has to tell the server so."""
LONGEST_BACKOFF_SECONDS = 60.0
HEALTHY_SECONDS = 60.0
"""A service that ran for so long begins again with the shortest pause when it dies."""
PORT_SECONDS = 20.0
"""How long the server of services that were killed may hold their port."""
LONGEST_LOG_BYTES = 64 << 20


def trim(log: Path) -> None:
    """Begin a long log anew: its service goes on writing to the end of the same file.

    What it held is kept beside it, unless the disk has no room for that.
    """
    if log.exists() and log.stat().st_size > LONGEST_LOG_BYTES:
        old = log.with_suffix(".old.log")
        try:
            shutil.copyfile(log, old)
        except OSError:
            old.unlink(missing_ok=True)
        os.truncate(log, 0)


class _Service:
    """One command that is started again when it dies."""

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
        """``secrets`` are variables that no other service has; ``inherited`` are open files that it goes on with; ``restart``
        keeps what it started when it ends by itself, and starts it again beside that."""
        self.name, self.command, self.grace, self.orphan_grace = name, command, grace, orphan_grace
        self.secrets, self.inherited, self.restart = secrets, inherited, restart
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
        """Start it again if it died, after a pause that grows while it keeps dying; keep its log within bounds.

        What the machine refuses (a full disk takes no log) is tried again later.
        """
        with suppress(OSError):
            trim(log_of(self.name))
        if self._running is not None and self._running.process.poll() is not None:
            self._restarts += self._running.restarts
            self._running.close()
            self._running = None
            if time.monotonic() - self._began > HEALTHY_SECONDS:
                self._pause = 0.5
            self._later("ended")
        if self._running is None and time.monotonic() >= self._again_at:
            try:
                self.begin()
            except OSError as error:
                self._later(f"does not start: {error}")
            else:
                self._restarts += 1

    def _later(self, what: str) -> None:
        self._pause = min(self._pause * 2, LONGEST_BACKOFF_SECONDS)
        self._again_at = time.monotonic() + self._pause
        say(f"{self.name} {what}; it restarts in {self._pause:g} s")

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    @property
    def restarts(self) -> int:
        """How often the command was started again, by its supervisor or with a new one."""
        return self._restarts + (self._running.restarts if self._running else 0)

    @property
    def state(self) -> ServiceState:
        pid = self._running.process.pid if self._running else None
        return ServiceState(name=self.name, pid=pid, restarts=self.restarts)


class Services:
    """The server, the worker and the reconciler; runs until it is told to stop."""

    def __init__(self, port: int, database: Mapping[str, str]) -> None:
        self.port, self.url = port, access.url_of(port)
        self.database = access.shown_database(database) or f"{SQLITE}, {align_home() / 'prefect' / 'prefect.db'}"
        self._of_database = database
        self.services: tuple[_Service, ...] = ()
        self.problems: dict[str, str] = {}
        self.max_runs: int | None = None
        self.stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._written: State | None = None

    def run(self) -> None:
        """Start everything in order, then keep it running. Raises EnvironmentFault if the start fails."""
        patience = PORT_SECONDS if _were_killed_at(self.url) else 0.0
        token_file().unlink(missing_ok=True)  # what the ones before said is over, and the port may take its time
        self._write("starting")
        self._listener = _listen(self.port, patience)
        token = access.new_token()
        issue(token)
        os.environ.update(access.of_client(self.url, token))
        fd, secrets = (
            self._listener.fileno(),
            {
                **self._of_database,
                **access.of_server(self.port, token),
                **access.OF_PAGES,
                access.PASSWORD: access.password(password_file()),
            },
        )
        server = _Service("server", server_command(fd, "warning"), secrets=secrets, inherited=[fd])
        take_runs = [sys.executable, "-m", "alignment.flows.service.prefect_worker", "--pool", POOL]
        worker = _Service("worker", take_runs, RUN_SECONDS, RUN_SECONDS, restart=True)
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
        """End everything: the runs under way save their work and say so, before the worker, which kills what it started when
        it ends, and the server, which is told; the reconciler, which would resume them, goes first."""
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
            with suppress(OSError):  # a full disk: the next look writes it
                partial = folder() / "state.partial"
                partial.write_text(state.model_dump_json(indent=2))
                os.replace(partial, folder() / "state.json")
                self._written = state


def _register() -> tuple[int, dict[str, str]]:
    """Register the shipped deployments; how many runs the pool has at once, and why any deployment of it cannot run, by its
    name."""
    register = [sys.executable, "-m", "alignment.flows.deployments", POOL]
    done = subprocess.run(register, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"the deployments were not registered: {(done.stderr or done.stdout)[-500:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    problems: dict[str, str] = answer["problems"]
    for name, problem in problems.items():
        say(f"the deployment {name} cannot run: {problem}")
    return answer["max_runs"], problems


def _end_runs(url: str) -> None:
    """Ask every run of the worker, and every other one that uses this server, to save its work and end."""
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
    deadline = time.monotonic() + TELL_SECONDS
    while _lives(record) and time.monotonic() < deadline:  # its journal is closed; it tells the server how it ended
        time.sleep(0.1)


def _lives(record: journal.RunRecord) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = record.find()
        return process is not None and process.status() != psutil.STATUS_ZOMBIE
    return False


def _were_killed_at(url: str) -> bool:
    """Whether the services before these had this address and did not end by themselves."""
    before = latest()
    return before is not None and before.url == url and before.phase in ("starting", "ready")


def _listen(port: int, patience: float) -> socket.socket:
    """Hold the server's port. Raises EnvironmentFault if somebody else still does after so many seconds."""
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
    held = (folder() / "lock").open("ab")  # until this process ends
    if not lock(held):
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
