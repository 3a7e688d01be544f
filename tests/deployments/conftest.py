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
    found = shutil.which(program) or (str(packaged[-1]) if packaged else None)
    if found is None:
        pytest.skip(f"PostgreSQL's {program} is not installed (Debian's package is called postgresql)")
    return found


@pytest.fixture(scope="package")
def database() -> Iterator[str]:
    """The URL of a PostgreSQL on loopback, which refuses to run as root and so to lie below root's own folders."""
    initdb, postgres = postgresql("initdb"), postgresql("postgres")
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    (folder / "password").write_text(PASSWORD)
    owner = "postgres" if os.geteuid() == 0 else None
    if owner:
        for path in (folder, folder / "password"):
            shutil.chown(path, owner)
    make = [initdb, "-D", str(folder / "data"), "-U", "align", "-A", "scram-sha-256", f"--pwfile={folder / 'password'}"]
    subprocess.run(make, check=True, capture_output=True, user=owner, cwd=folder)
    port = free_port()
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [postgres, "-D", str(folder / "data"), *options], user=owner, cwd=folder, stdout=log, stderr=log
        )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert wait_until(answers, 60), (folder / "log").read_text()
    yield f"postgresql+asyncpg://align:{PASSWORD}@127.0.0.1:{port}/postgres"
    server.send_signal(signal.SIGINT)
    server.wait(30)
    shutil.rmtree(folder)


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
