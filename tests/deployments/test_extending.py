"""The plug-in of docs/extending.md, installed beside the project: it runs, resumes, is deployed and has its lineage."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from alignment.flows.access import TOKEN, URL
from tests.align import align_here
from tests.deployments.up import ROOT, Services
from tests.pages import DOCS, files_of
from tests.processes import processes_of, wait_until

FILES = files_of(DOCS / "extending.md")
STEPS = 1000
SHORT = [
    f"unlikelihood.training.max_steps={STEPS}",
    "resources={trainers: 1, engines: 1, threads: 1, progress_seconds: 0.1}",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Installed:
    """A scratch environment that sees the project and its packages, and has the plug-in."""

    def __init__(self, folder: Path, api: dict[str, str]) -> None:
        self.source, self.home, python = folder / "source", folder / "home", folder / "environment" / "bin" / "python"
        for name, text in FILES.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_text(text)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])], check=True)
        site = subprocess.check_output(
            [str(python), "-c", "from sysconfig import get_path; print(get_path('purelib'))"]
        )
        shared = f"import site; site.addsitedir({get_path('purelib')!r}); import sys; sys.path.append({str(ROOT)!r})\n"
        (Path(site.decode().strip()) / "shared.pth").write_text(shared)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(self.source)], check=True, capture_output=True)
        self.python = str(python)
        self.recipe = str(self.source / "unlikelihood" / "unlikelihood-tiny.yaml")
        self.settings = {**os.environ, **api, "ALIGN_HOME": str(self.home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of ours, under way."""
        # `-P`: the command `align` imports nothing from the working folder, which is that of the source here.
        command = [self.python, "-P", "-m", "alignment.flows.cli.main", *arguments]
        return subprocess.Popen(
            command, cwd=self.source, env=self.settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def align(self, *arguments: str) -> str:
        """The output of a command."""
        process = self.start(*arguments)
        printed, complained = process.communicate(timeout=800)
        assert process.returncode == 0, f"{arguments}: {printed[-2000:]}\n{complained[-4000:]}"
        return printed


def changes() -> str:
    """Git's status of the project's folder."""
    return subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Iterator[Installed]:
    before = changes()
    yield Installed(tmp_path_factory.mktemp("plug-in"), prefect_api)
    assert changes() == before, "nothing of the project was edited"


@pytest.fixture(scope="module")
def resumed(installed: Installed) -> dict[str, Any]:
    """The outcome of a run that was killed while the plug-in's stage trained, and was resumed."""
    run = installed.start("run", installed.recipe, *(word for override in SHORT for word in ("--set", override)))
    saved = str(installed.home / "store/progress/*/step-*/complete.json")
    assert wait_until(lambda: bool(glob.glob(saved)) or run.poll() is not None, 300)  # folders may disappear meanwhile
    assert run.poll() is None, run.communicate()
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert wait_until(lambda: not processes_of(installed.home), 60)
    outcome: dict[str, Any] = json.loads(installed.align("resume", "last", "--json").strip().splitlines()[-1])
    return outcome


def test_the_plugin_takes_less_than_150_lines_of_code() -> None:
    assert sum(bool(line.strip()) for text in FILES.values() for line in text.splitlines()) < 150


def test_a_method_with_its_own_stage_and_loss_needs_three_files() -> None:
    beside = {
        "pyproject.toml",
        "unlikelihood/rows.py",
        "unlikelihood/rewards.py",
    }  # the package, and plug-ins of other kinds
    assert sorted(FILES.keys() - beside) == [
        "unlikelihood/method.py",
        "unlikelihood/stage.py",
        "unlikelihood/unlikelihood-tiny.yaml",
    ]
    assert "METHOD = Method(" in FILES["unlikelihood/method.py"]
    assert "STAGE = Stage(" in FILES["unlikelihood/stage.py"]
    assert "def loss(" in FILES["unlikelihood/stage.py"]


def test_the_plugin_adds_its_fields_and_recipe(installed: Installed) -> None:
    assert "Weight of the unlikelihood loss" in installed.align("fields", "unlikelihood")
    listing = json.loads(installed.align("deployments", "--json"))
    assert listing["unlikelihood-tiny"]["distribution"] == "align-unlikelihood"
    assert Path(listing["unlikelihood-tiny"]["recipe"]).is_file()
    assert {"quickstart", "nightly"} <= listing.keys()


def test_a_killed_run_of_the_plugin_resumes_within_its_stage(resumed: dict[str, Any]) -> None:
    stages = {stage["label"]: stage for stage in resumed["stages"]}
    assert [stages[label]["state"] for label in ("model", "unlikelihood/data", "unlikelihood")] == [
        "cached",
        "cached",
        "run",
    ]
    assert 0 < stages["unlikelihood"]["cost"]["train_steps"] < STEPS
    assert resumed["status"] == "completed"


def test_a_killed_run_shows_as_dead_and_its_finished_stages_as_cached(
    installed: Installed, resumed: dict[str, Any], prefect_api: dict[str, str]
) -> None:
    status = align_here(installed.home, "status", "--json")
    runs = {run["run"]: run["status"] for run in json.loads(status.stdout)["runs"]}
    (killed,) = runs.keys() - {resumed["run_id"]}
    assert runs == {killed: "died", resumed["run_id"]: "completed"}
    with SyncPrefectClient(api=prefect_api[URL], auth_string=prefect_api[TOKEN]) as client:
        state = client.read_flow_run(UUID(killed)).state
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(resumed["run_id"])]))
        shown = {task.name: task.state_name for task in client.read_task_runs(flow_run_filter=chosen)}
    assert (shown["model"], shown["unlikelihood/data"], shown["unlikelihood"]) == ("Cached", "Cached", "Completed")
    assert state is not None
    assert state.type == "CRASHED"


def test_loss_reward_and_verifier_of_the_plugin_are_used(resumed: dict[str, Any]) -> None:
    metrics = {stage["label"]: stage["metrics"] for stage in resumed["stages"]}
    assert metrics["unlikelihood"]["loss"] > 0
    policy = resumed["metrics"]["policies"]["unlikelihood"]
    assert 0 <= policy["reward_1"] <= 1, "one less the share of characters"
    assert policy["reward"] == pytest.approx(policy["accuracy"] + 0.5 * policy["reward_1"])


def test_the_policy_of_the_plugin_has_its_lineage(installed: Installed, resumed: dict[str, Any]) -> None:
    printed = installed.align("lineage", resumed["outputs"]["policy"])
    assert all(label in printed for label in ("unlikelihood", "unlikelihood/data"))


def test_prefect_deploys_the_recipe_of_the_plugin(installed: Installed, services: Services) -> None:
    (installed.source / "prefect.yaml").write_text(
        installed.align("deployments", "align-unlikelihood", "--prefect-yaml")
    )
    deploy = [installed.python, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    environment = {**services.environment, "ALIGN_HOME": str(installed.home)}
    done = subprocess.run(deploy, cwd=installed.source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    deployment = services.get("/deployments/name/alignment/unlikelihood-tiny")
    assert deployment["entrypoint"] == "alignment.flows.deployment_flows.deployed_unlikelihood_tiny"
    assert deployment["description"].startswith("A tiny model learns from good and bad answers")
    section = deployment["parameter_openapi_schema"]["definitions"]["UnlikelihoodConfig"]["properties"]["weight"]
    assert section["description"] == "Weight of the unlikelihood loss of bad completions."
    services.prefect("deployment", "delete", "alignment/unlikelihood-tiny")


def test_without_the_plugin_its_runs_and_recipes_name_the_missing_method(
    installed: Installed, resumed: dict[str, Any]
) -> None:
    for command in (["resume", resumed["run_id"]], ["run", installed.recipe]):
        done = subprocess.run(
            [sys.executable, "-m", "alignment.flows.cli.main", *command],
            cwd=ROOT,
            env=installed.settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        printed = " ".join(done.stderr.split())
        assert "method: is 'unlikelihood'; choose one of" in printed
        assert "a plug-in that provides it must be installed" in printed
