"""Processes left by a killed run, and where a run executes: on its own Ray or on the named cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.align import Align
from tests.conftest import TinyModel
from tests.processes import processes_of, wait_until

ROOT = Path(__file__).parents[2]
RECIPE = """
method: sft
name: small
model: {{name: {model}}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 16}}}}
resources: {{trainers: 1, engines: 1, threads: 1}}
evaluation: {{prompts: {{task: reverse, split: test, rows: 8}}, generation: {{max_completion_length: 4}}, verifier: task}}
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: TinyModel) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.format(model=tiny_model()))
    return path


def test_an_unloadable_verifier_is_reported_before_any_training(align: Align, recipe: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    failure = align(home, "run", str(recipe), "--set", "evaluation.verifier=nowhere.py:right", expect=2)
    assert "nowhere.py:right' cannot be loaded: FileNotFoundError: no file /" in failure["error"]
    makers = {artifact["made_by"] for artifact in align(home, "artifacts", "ls")["artifacts"]}
    assert makers <= {"model", "sft/data"}


def test_a_killed_command_leaves_no_server_no_host_no_ray_and_no_tracker(
    recipe: Path, tmp_path: Path, migrated: Path
) -> None:
    home = tmp_path / "home"
    (home / "prefect").mkdir(parents=True)
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    command = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "alignment.flows.cli.main",
            "run",
            str(recipe),
            "--set",
            "tracking.wandb={project: tests}",
        ],
        cwd=ROOT,
        env={**os.environ, "ALIGN_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def everything_runs() -> bool:
        lines = processes_of(home).values()
        return all(
            any(sign in line for line in lines) for sign in ("prefect_server", "host.server", "raylet", "wandb-core")
        )

    try:
        assert wait_until(everything_runs, 120), processes_of(home)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait(30)
    assert wait_until(lambda: not processes_of(home), 30), processes_of(home)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster started outside the run; its address."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    head = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0"]
    head += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--include-dashboard=false", "--num-cpus=2"]
    head += ["--object-store-memory=134217728", "--disable-usage-stats"]
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    log = (folder / "head.log").open("wb")
    ray = subprocess.Popen(head, env={**os.environ, **loopback}, stdout=log, stderr=log, start_new_session=True)
    started = folder / "ray_current_cluster"
    assert wait_until(started.exists, 60), (folder / "head.log").read_text()
    yield started.read_text().strip()
    ray.terminate()
    ray.wait(30)
    with_children = [p for p in psutil.process_iter() if _below(p, folder)]
    for process in with_children:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _below(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in part for part in process.cmdline())
    except psutil.Error:
        return False


def test_a_run_joins_the_cluster_at_ray_address_and_leaves_it_running(
    align: Align, recipe: Path, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # or Ray takes 127.0.0.1 for the machine's own address
    outcome = align(tmp_path / "home", "run", str(recipe), "--set", "resources.trainers=2")
    assert outcome["status"] == "completed"
    assert not [line for line in processes_of(tmp_path / "home").values() if "raylet" in line]
    status = [str(Path(sys.executable).with_name("ray")), "status", f"--address={cluster}"]
    assert subprocess.run(status, capture_output=True, timeout=60).returncode == 0


def test_an_unreachable_ray_address_is_reported_at_once(
    align: Align, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    failure = align(tmp_path / "home", "run", str(recipe), expect=3)
    assert "no usable Ray cluster at RAY_ADDRESS=127.0.0.1:1: " in failure["error"]
    assert "Connection refused" in failure["error"]
