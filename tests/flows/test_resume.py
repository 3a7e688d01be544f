"""Taking a run up again, asking why its stages ran, and running some of them again on purpose, on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from flows.access import TOKEN, URL
from tests.align import Align, references, states
from tests.conftest import TinyModel
from tests.processes import processes_of, wait_until

ROOT = Path(__file__).parents[2]
STEPS = 300
RECIPE = """
method: sft
name: small
model: {{name: {model}}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 32, num_train_epochs: 500, max_steps: {steps}}}}}
resources: {{trainers: 1, engines: 1, progress_seconds: 1}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "small.yaml").write_text(RECIPE.format(model=tiny_model(), steps=STEPS))
    return home


@pytest.fixture(scope="module")
def killed(home: Path, prefect_api: dict[str, str]) -> str:
    """The id of a run that was killed while it trained, after its first checkpoint."""
    run = subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "run", str(home / "small.yaml")],
        cwd=ROOT,
        env={**os.environ, "ALIGN_HOME": str(home), **prefect_api},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_until(lambda: any(home.glob("store/progress/*/step-*/complete.json")), 240)
    run.send_signal(signal.SIGKILL)
    run.wait(30)
    assert wait_until(lambda: not processes_of(home), 60)
    (record,) = [path.name for path in (home / "runs").iterdir()]
    return record


@pytest.fixture(scope="module")
def resumed(align: Align, home: Path, killed: str) -> dict[str, Any]:
    return align(home, "resume", killed[:8])


def test_a_killed_run_shows_as_dead_and_resume_goes_on_from_its_checkpoint(
    align: Align, home: Path, killed: str, resumed: dict[str, Any], prefect_api: dict[str, str]
) -> None:
    assert states(resumed) == {"model": "cached", "sft/data": "cached", "sft": "run"}
    trained = next(stage for stage in resumed["stages"] if stage["label"] == "sft")
    assert 0 < trained["cost"]["train_steps"] < STEPS
    runs = {run["run"]: run["status"] for run in align(home, "status", expect=3)["runs"]}
    assert runs == {killed: "died", resumed["run_id"]: "completed"}
    with SyncPrefectClient(api=prefect_api[URL], auth_string=prefect_api[TOKEN]) as client:
        state = client.read_flow_run(UUID(killed)).state
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(resumed["run_id"])]))
        shown = {task.name: task.state_name for task in client.read_task_runs(flow_run_filter=chosen)}
    assert shown == {"model": "Cached", "sft/data": "Cached", "sft": "Completed"}
    assert state is not None
    assert state.type == "CRASHED"


def test_explain_says_for_each_stage_why_it_ran_or_was_cached(
    align: Align, home: Path, killed: str, resumed: dict[str, Any]
) -> None:
    stages = {stage["label"]: stage for stage in align(home, "explain", "last")["stages"]}
    assert stages["model"]["why"].startswith("same key as model of ")
    assert f"run {killed[:8]}, made on " in stages["model"]["why"]
    assert (stages["sft"]["state"], stages["sft"]["why"]) == ("run", "no earlier run of this stage in this store")


def test_from_stage_runs_a_stage_and_what_depends_on_it_again_to_the_same_artifacts(
    align: Align, home: Path, resumed: dict[str, Any]
) -> None:
    again = align(home, "run", str(home / "small.yaml"), "--from-stage", "sft/data")
    assert states(again) == {"model": "cached", "sft/data": "run", "sft": "run"}
    assert references(again) == references(resumed)
    unknown = align(home, "run", str(home / "small.yaml"), "--from-stage", "stf", expect=2)
    assert unknown["error"].startswith("--from-stage stf: this recipe has no such stage; there are sft")


def test_a_run_that_nobody_knows_is_said(align: Align, home: Path, resumed: dict[str, Any]) -> None:
    assert "is not a run" in align(home, "resume", "ffffffffff", expect=2)["error"]
