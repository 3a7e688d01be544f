"""What ``align up`` starts: a Prefect server, a worker and the reconciler, kept running by one process in the background.

``python -m flows.services PORT`` is that process. Its end, in any way, ends everything below it; runs that are under way
save their work first and go on when the services are started again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from alignment_core import journal
from alignment_core.artifacts import align_home
from alignment_core.artifacts.faults import check_room, explained
from alignment_core.errors import AlignmentError, EnvironmentFault
from alignment_core.host.supervised import Supervised, fresh_folder
from alignment_core.processes import ProcessId
from flows.console import say
from flows.environment import at_home

POOL = "alignment"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
START_SECONDS = 180.0
STOP_SECONDS = 120.0
RUN_SECONDS = 60.0
"""What a worker's runs have to save their work when the services are stopped."""
LONGEST_BACKOFF_SECONDS = 60.0
HEALTHY_SECONDS = 60.0
"""A service that ran for so long begins again with the shortest pause when it dies."""
LONGEST_LOG_BYTES = 64 << 20
LEAST_FREE_BYTES = 8 << 20
"""Without so much room on the disk the services do not start: neither their database nor their logs would take a line."""
ROOT = Path(__file__).resolve().parent.parent


class ServiceState(BaseModel):
    """One service as ``align status`` shows it."""

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int | None
    restarts: int = 0


class State(ProcessId):
    """What the background process says of itself."""

    url: str
    database: str
    """Without its password."""
    phase: str
    """``starting``, ``ready``, ``stopping`` or ``failed``."""
    services: tuple[ServiceState, ...] = ()
    error: str | None = None


def folder() -> Path:
    """Where the background process keeps its lock, its state and the logs of the services."""
    return align_home() / "services"


def running() -> State | None:
    """The services of this ALIGN_HOME, if their process lives."""
    with suppress(OSError, ValidationError):
        state = State.model_validate_json((folder() / "state.json").read_text())
        with (folder() / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return state
    return None


def use_if_running() -> None:
    """Point this process at the services' server, if they run, unless the user named one."""
    state = running()
    if state is not None and state.phase == "ready":
        os.environ.setdefault("PREFECT_API_URL", state.url)


def environment(port: int) -> dict[str, str]:
    """What the services inherit; the user's own settings win."""
    settings = {
        **at_home(),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_CLIENT_MAX_RETRIES": "9",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # or its database grows for ever
    }
    return {**settings, **os.environ, "PREFECT_API_URL": url_of(port), "ALIGN_HOME": str(align_home())}


def url_of(port: int) -> str:
    """Address of the server's API."""
    return f"http://127.0.0.1:{port}/api"


def start(port: int, database: str | None) -> State:
    """Start the background process and wait until all is ready. Raises EnvironmentFault with what went wrong."""
    with explained("create", folder()):
        folder().mkdir(parents=True, exist_ok=True)
    check_room(folder(), LEAST_FREE_BYTES, "Prefect's server")
    log = folder() / "services.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.services", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={**environment(port), **({DATABASE: database} if database else {})},
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        state = running()
        if state and state.pid == process.pid and state.phase == "ready":
            return state
        if process.poll() is not None:
            with suppress(OSError, ValidationError):
                state = State.model_validate_json((folder() / "state.json").read_text())
            reason = state.error if state and state.pid == process.pid and state.error else "it ended at once"
            raise EnvironmentFault(f"the services did not start: {reason}; see {log}")
        time.sleep(0.1)
    process.terminate()
    raise EnvironmentFault(f"the services did not start within {START_SECONDS:g} seconds; see {log}")


def stop(state: State) -> None:
    """End the background process and wait for it. Raises EnvironmentFault if it does not end."""
    process = state.find()
    if process is not None:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while running() is not None:
        if time.monotonic() > deadline:
            raise EnvironmentFault(f"process {state.pid} did not end within {STOP_SECONDS:g} seconds; end it by hand")
        time.sleep(0.1)


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

    def __init__(self, name: str, command: list[str], grace: float = 10.0, orphan_grace: float = 0.0) -> None:
        self.name, self.command, self.grace, self.orphan_grace = name, command, grace, orphan_grace
        self.restarts = 0
        self._pause = 0.5
        self._again_at = 0.0
        self._running: Supervised | None = None

    def begin(self) -> None:
        temporary = fresh_folder(align_home() / "tmp", "s-")
        log = folder() / f"{self.name}.log"
        self._running = Supervised(
            self.command, os.environ, log, temporary, grace=self.grace, orphan_grace=self.orphan_grace
        )
        self._began = time.monotonic()

    def keep_running(self) -> None:
        """Start it again if it died, after a pause that grows while it keeps dying; keep its log within bounds.

        What the machine refuses (a full disk takes no log) is tried again later.
        """
        with suppress(OSError):
            trim(folder() / f"{self.name}.log")
        if self._running is not None and self._running.process.poll() is not None:
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
                self.restarts += 1

    def _later(self, what: str) -> None:
        self._pause = min(self._pause * 2, LONGEST_BACKOFF_SECONDS)
        self._again_at = time.monotonic() + self._pause
        say(f"{self.name} {what}; it starts again in {self._pause:g} s")

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    @property
    def state(self) -> ServiceState:
        pid = self._running.process.pid if self._running else None
        return ServiceState(name=self.name, pid=pid, restarts=self.restarts)


class Services:
    """The server, the worker and the reconciler; runs until it is told to stop."""

    def __init__(self, port: int) -> None:
        prefect = [sys.executable, "-m", "prefect"]
        self.url = url_of(port)
        self.server = _Service("server", [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)])
        self.worker = _Service("worker", [*prefect, "worker", "start", "--pool", POOL], RUN_SECONDS, RUN_SECONDS)
        self.reconciler = _Service("reconciler", [sys.executable, "-m", "flows.reconcile"])
        self.stopping = threading.Event()
        self._written: State | None = None

    def run(self) -> None:
        """Start everything in order, then keep it running. Raises EnvironmentFault if the start fails."""
        self._write("starting")
        self.server.begin()
        self._write("starting")
        self._wait_for_server()
        self._prefect("work-pool", "create", POOL, "--type", "process", may_fail=True)  # it may be there already
        self._prefect("--no-prompt", "deploy", "--all")
        if self.stopping.is_set():
            return
        self.worker.begin()
        self.reconciler.begin()
        self._write("ready")
        while not self.stopping.wait(0.5):
            for service in (self.server, self.worker, self.reconciler):
                service.keep_running()
            self._write("ready")

    def close(self, error: str | None = None) -> None:
        """End everything: the worker takes no more runs, those under way save their work, the server goes last."""
        self._write("stopping", error)
        ending = threading.Thread(target=self.worker.close)
        ending.start()
        _end_runs()
        ending.join()
        self.reconciler.close()
        self.server.close()
        self._write("failed" if error else "stopped", error)

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.stopping.is_set():
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            process = self.server._running
            if process is None or process.process.poll() is not None or time.monotonic() > deadline:
                raise EnvironmentFault(f"the Prefect server did not start; see {align_home() / 'logs' / 'server.log'}")
            time.sleep(0.2)

    def _prefect(self, *arguments: str, may_fail: bool = False) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode and not may_fail:
            raise EnvironmentFault(f"`prefect {' '.join(arguments)}` failed: {(done.stderr or done.stdout)[-500:]}")

    def _write(self, phase: str, error: str | None = None) -> None:
        state = State(
            **ProcessId.mine().model_dump(),
            url=self.url,
            database=_without_password(os.environ.get(DATABASE)),
            phase=phase,
            services=tuple(service.state for service in (self.server, self.worker, self.reconciler)),
            error=error,
        )
        if state != self._written:
            with suppress(OSError):  # a full disk: the next look writes it
                partial = folder() / "state.partial"
                partial.write_text(state.model_dump_json(indent=2))
                os.replace(partial, folder() / "state.json")
                self._written = state


def _end_runs() -> None:
    """Ask every run of the worker to save its work and end."""
    threads = [
        threading.Thread(target=_end_run, args=(record,))
        for record in journal.runs()
        if record.deployed and journal.is_alive(record)
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


def stop_seconds(recipe: Mapping[str, Any]) -> float:
    """What the recipe of a run gives its stages to save their work."""
    return float(recipe["resources"]["stop_seconds"])


def _without_password(url: str | None) -> str:
    if url is None:
        return f"sqlite, {align_home() / 'prefect' / 'prefect.db'}"
    parts = urlsplit(url)
    place = parts.hostname or ""
    return urlunsplit(parts._replace(netloc=f"{place}:{parts.port}" if parts.port else place, query=""))


def _lock() -> BinaryIO | None:
    lock = (folder() / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def main() -> int:
    """Entry point of the background process."""
    folder().mkdir(parents=True, exist_ok=True)
    lock = _lock()
    if lock is None:
        say("other services of this ALIGN_HOME run already")
        return 1
    services = Services(int(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: services.stopping.set())
    error: str | None = None
    try:
        services.run()
    except (AlignmentError, OSError) as failure:
        error = str(failure)
        say(error)
    services.close(error)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
