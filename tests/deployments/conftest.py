"""One `align up` for the tests of this folder, over a real PostgreSQL.

With SQLite this version of Prefect's server has been seen to block itself for a minute when a worker dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment.flows import access
from tests.conftest import TinyModel
from tests.deployments.up import PASSWORD, Services
from tests.processes import free_port, wait_until


def postgresql(program: str) -> str:
    """Path of a program of PostgreSQL's, which Debian keeps out of PATH."""
    packaged = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    path = shutil.which(program) or (str(packaged[-1]) if packaged else None)
    if path is None:
        pytest.skip(f"PostgreSQL's {program} is not installed (Debian's package is called postgresql)")
    return path


class PostgreSQL:
    """A server on loopback, which refuses to run as root and so cannot use root's folders."""

    def __init__(self) -> None:
        initdb = postgresql("initdb")
        self._program = postgresql("postgres")
        self.folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self._owner = "postgres" if os.geteuid() == 0 else None
        if self._owner:
            for path in (self.folder, password):
                shutil.chown(path, self._owner)
        data = str(self.folder / "data")
        make = [initdb, "-D", data, "-U", "align", "-A", "scram-sha-256", f"--pwfile={password}"]
        subprocess.run(make, check=True, capture_output=True, user=self._owner, cwd=self.folder)
        self.port = free_port()
        self.url = f"postgresql+asyncpg://align:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        self.start()

    def start(self) -> None:
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.folder), "-c", "fsync=off"]
        command = [self._program, "-D", str(self.folder / "data"), *options]
        with (self.folder / "log").open("ab") as log:
            environment = {
                name: value for name, value in os.environ.items() if name != "ALIGN_HOME"
            }  # it is of no home
            self._server = subprocess.Popen(
                command, user=self._owner, cwd=self.folder, stdout=log, stderr=log, env=environment
            )
        assert wait_until(self._answers, 60), (self.folder / "log").read_text()

    def stop(self) -> None:
        self._server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        self._server.wait(30)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.stop()
    shutil.rmtree(server.folder)


@pytest.fixture(scope="package")
def database(postgres: PostgreSQL) -> str:
    """Its URL."""
    return postgres.url


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel, database: str) -> Iterator[Services]:
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    patch.setenv("ALIGN_HOME", str(home))
    running = Services(home, tiny_model())
    try:
        running.align("up", "--port", str(running.port), variables={access.DATABASE: database})
        yield running
    finally:
        running.align("down")
        patch.undo()
