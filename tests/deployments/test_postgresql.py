"""The services with a real PostgreSQL as Prefect's database."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment_core import journal
from tests.deployments.up import Services
from tests.processes import processes_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OVERRIDES = [
    "model={scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}",
    "sft={data: {task: reverse, rows: 64}, training: {batch_size: 32, num_train_epochs: 100}}",
    "evaluation=null",
    "promotion=null",
    "resources={trainers: 1, engines: 1, progress_seconds: 2}",
]


def postgresql(program: str) -> str:
    """Path of a program of PostgreSQL's, which Debian keeps out of PATH."""
    packaged = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    found = shutil.which(program) or (str(packaged[-1]) if packaged else None)
    if found is None:
        pytest.skip(f"PostgreSQL's {program} is not installed (Debian's package is called postgresql)")
    return found


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL on loopback, which refuses to run as root."""
    initdb, postgres = postgresql("initdb"), postgresql("postgres")
    folder = Path(tmp_path_factory.mktemp("postgresql"))
    (folder / "password").write_text("secret-of-the-test")
    owner = "postgres" if os.geteuid() == 0 else None
    if owner:
        for path in (folder, folder / "password"):
            shutil.chown(path, owner)
        folder.parent.chmod(0o755)
        folder.parent.parent.chmod(0o755)
    make = [initdb, "-D", str(folder / "data"), "-U", "align", "-A", "scram-sha-256", f"--pwfile={folder / 'password'}"]
    subprocess.run(make, check=True, capture_output=True, user=owner, cwd=folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [postgres, "-D", str(folder / "data"), *options], user=owner, cwd=folder, stdout=log, stderr=log
        )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert wait_until(answers, 60), (folder / "log").read_text()
    yield f"postgresql+asyncpg://align:secret-of-the-test@127.0.0.1:{port}/postgres"
    server.send_signal(signal.SIGINT)
    server.wait(30)


def test_a_killed_run_goes_on_and_the_password_is_nowhere(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    services = Services(home)
    try:
        state = services.align("up", "--port", str(services.port), "--database", database)
        assert state["database"].startswith("postgresql+asyncpg://127.0.0.1:")
        run_id = services.start_run(OVERRIDES)
        assert wait_until(lambda: journal.folder_of(run_id).exists(), 120), services.states(run_id)
        os.kill(journal.read(run_id).pid, signal.SIGKILL)
        assert wait_until(lambda: services.state(run_id) in ("Completed", "Failed"), 240), services.states(run_id)
        names = [name for name, _ in services.states(run_id)]
        assert names[-1] == "Completed"
        assert "Resuming" in names
    finally:
        services.align("down")
    assert wait_until(lambda: not processes_of(home), 30), processes_of(home)
    assert not (home / "prefect" / "prefect.db").exists()
    written = [path for path in home.rglob("*") if path.is_file() and b"secret-of-the-test" in path.read_bytes()]
    assert written == []
