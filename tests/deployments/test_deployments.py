"""The deployment commands of the README against the real server and worker of `align up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse

from alignment.flows import deployments
from alignment.flows.shipped_recipes import pool, shipped
from alignment_core.errors import UserError
from alignment_core.recipes import load_recipe
from tests.deployments.up import ROOT, Services
from tests.pages import DOCS, files_of

OVERRIDES = [
    "sft={data: {task: reverse, rows: 64}, training: {batch_size: 16, max_steps: 4}}",
    "evaluation={prompts: {task: reverse, split: test, rows: 8}, generation: {max_completion_length: 4}, verifier: task}",
    "resources={trainers: 1, engines: 1, threads: 1}",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def runs_of(services: Services, deployment: str, *states: str) -> list[Any]:
    """The flow runs of a deployment, those in these states if any are given."""
    chosen: dict[str, Any] = {"deployments": {"name": {"any_": [deployment]}}}
    if states:
        chosen["flow_runs"] = {"state": {"type": {"any_": list(states)}}}
    return services.get("/flow_runs/filter", chosen)


def eventually(look: Callable[[], Any], seconds: float = 180) -> Any:
    """The first result of ``look`` that is not empty."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1)
    return value


def test_every_shipped_recipe_is_a_deployment(services: Services) -> None:
    assert {deployment["name"] for deployment in services.get("/deployments/filter", {})} == shipped().keys()


def test_the_run_form_shows_typed_described_fields_with_the_shipped_defaults(services: Services) -> None:
    deployment = services.get("/deployments/name/alignment/iterative-dpo")
    schema = deployment["parameter_openapi_schema"]
    section = schema["definitions"]["IterativeDpoConfig"]["properties"]
    assert section["rounds"]["type"] == "integer"
    assert section["rounds"]["description"] == "Number of rounds."
    assert schema["properties"]["recipe"]["default"]["model"]["name"] == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("name", ["iterative-dpo", "nightly", "ppo"])
def test_a_deployment_accepts_a_recipe_as_written(services: Services, name: str) -> None:
    written = yaml.safe_load((ROOT / "deployments" / "recipes" / f"{name}.yaml").read_text())
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
    deployment = services.get(f"/deployments/name/alignment/{name}")
    request = {"parameters": {"recipe": written}, "state": later}
    run = services.get(f"/deployments/{deployment['id']}/create_flow_run", request)
    assert run["parameters"]["recipe"] == written
    services.get(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


def test_a_users_recipe_is_deployed_with_a_schedule_and_stays(services: Services, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("method: sft\nname: mine\nmodel: some/model\nsft: {data: rows.jsonl}\n")
    due = ["--cron", "0 3 * * *", "--timezone", "Europe/Berlin"]
    outcome = services.align("deploy", str(recipe), "--name", "mine", *due, folder=tmp_path)
    assert outcome["deployment"] == "alignment/mine"
    recipe.write_text(recipe.read_text() + "seed: 7\n")
    again = ["--name", "mine", "--set", "sft.training.max_steps=3"]
    services.align("deploy", str(recipe), *again, folder=tmp_path.parent)
    recipe.unlink()

    with SyncPrefectClient(api=services.url, auth_string=services.token) as client:
        ppo = client.read_deployment_by_name("alignment/ppo")
        steps = [{"prefect.deployments.steps.set_working_directory": {"directory": "/gone"}}]
        of_a_file = DeploymentUpdate(entrypoint="flows/deployment_flows.py:deployed_ppo", pull_steps=steps)
        client.update_deployment(ppo.id, of_a_file)
        assert (
            "/gone/flows/deployment_flows.py:deployed_ppo does not load"
            in deployments.problems(client, "alignment")["ppo"]
        )
        deployments.register_shipped(client)  # as `align up` does
        assert deployments.problems(client, "alignment") == {}
        assert client.read_deployment_by_name("alignment/ppo").pull_steps in (None, [])
        mine = client.read_deployment_by_name("alignment/mine")
        kept = mine.parameters["recipe"]
        assert (kept["seed"], kept["sft"]["training"]["max_steps"]) == (7, 3)
        assert kept["sft"]["data"]["sources"][0]["path"] == f"{tmp_path}/rows.jsonl"
        assert mine.job_variables["working_dir"] == str(services.home), "a folder that stays"
        assert mine.job_variables["env"]["ALIGN_PATHS_BEGIN"] == str(tmp_path), "those of a run's overrides"
        assert [entry.schedule.timezone for entry in mine.schedules] == ["Europe/Berlin"]

        client.update_deployment(mine.id, DeploymentUpdate(entrypoint="flows.alignment.run_sft"))
        assert "No module named 'flows.alignment'" in deployments.problems(client, "alignment")["mine"]
        client.update_deployment(mine.id, DeploymentUpdate(entrypoint=mine.entrypoint))

        tmp_path.rename(tmp_path.with_name("moved"))
        assert deployments.problems(client, "alignment") == {}
        client.update_deployment(mine.id, DeploymentUpdate(job_variables={"working_dir": "/gone"}))
        assert deployments.problems(client, "alignment") == {"mine": "its folder /gone is gone"}
        client.delete_deployment(mine.id)


def test_a_users_flow_is_deployed_from_its_file(services: Services, tmp_path: Path) -> None:
    (tmp_path / "two_betas.py").write_text(files_of(DOCS / "flows.md")["two_betas.py"])
    outcome = services.align(
        "deploy", "two_betas.py", "--name", "betas", "--set", "betas=[0.2]", "--cron", "0 3 * * *", folder=tmp_path
    )
    assert outcome["deployment"] == "alignment/betas"
    with SyncPrefectClient(api=services.url, auth_string=services.token) as client:
        deployment = client.read_deployment_by_name("alignment/betas")
        assert (deployment.entrypoint, deployment.path) == ("two_betas.py:two_betas", str(tmp_path))
        assert deployment.job_variables["working_dir"] == str(tmp_path)
        assert deployment.job_variables["env"] == pool()["job_variables"]["env"], "heartbeats, as of a recipe"
        assert (deployment.parameters, len(deployment.schedules)) == ({"betas": [0.2]}, 1)
        form = deployment.parameter_openapi_schema or {}
        assert form["properties"]["settings"]["default"]["name"] == "two-betas"
        assert deployments.problems(client, "alignment") == {}
        (tmp_path / "two_betas.py").unlink()
        assert "No such file" in deployments.problems(client, "alignment")["betas"]
        client.delete_deployment(deployment.id)


def test_a_deployment_whose_code_does_not_load_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def flow(): pass\n")
    (tmp_path / "broken.py").write_text("def flow(:\n")
    there = [{"prefect.deployments.steps.set_working_directory": {"directory": str(tmp_path)}}]
    fetched = [{"prefect.deployments.steps.git_clone": {"repository": "https://example.invalid/code"}}]

    def problem(entrypoint: str, steps: list[Any]) -> str | None:
        return deployments._problem(
            DeploymentResponse(name="d", flow_id=UUID(int=1), entrypoint=entrypoint, pull_steps=steps)  # type: ignore[call-arg]
        )

    assert problem("mine.py:flow", there) is None
    assert problem("anything.py:flow", fetched) is None, "unknown before it is fetched"
    assert problem("alignment.flows.deployment_flows.deployed_sft", []) is None
    ours = [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    assert problem("flows/deployment_flows.py:deployed_sft", ours) is None, "as the project's prefect.yaml had it once"
    assert "flows/deployment_flows.py:deployed_gone does not exist" in str(
        problem("flows/deployment_flows.py:deployed_gone", ours)
    )
    assert "No such file" in str(problem("gone.py:flow", there))
    assert "mine.py:other does not exist" in str(problem("mine.py:other", there))
    assert "broken.py:flow does not load: invalid syntax" in str(problem("broken.py:flow", there))
    assert "does not load: ModuleNotFoundError" in str(problem("no.such.module", []))
    assert "alignment.flows.deployment_flows.gone does not exist" in str(
        problem("alignment.flows.deployment_flows.gone", [])
    )


def test_invalid_deployments_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="--name nightly: a deployment of this name comes with the project"):
        deployments.register_recipe(None, "nightly", load_recipe(ROOT / "deployments/recipes/sft.yaml"), ROOT, None)  # type: ignore[arg-type]


def test_a_deployment_runs_to_completion_with_parameters(services: Services) -> None:
    overrides = [f"model={services.model}", *OVERRIDES]
    before = {run["id"] for run in runs_of(services, "sft")}
    services.prefect("deployment", "run", "alignment/sft", "--param", f"overrides={json.dumps(overrides)}", "--watch")
    (run,) = (run for run in runs_of(services, "sft") if run["id"] not in before)
    assert run["state"]["type"] == "COMPLETED"
    tasks = services.get("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {"model", "sft", "sft/evaluation"} <= {task["name"] for task in tasks}
    left = services.get("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert sorted(artifact["type"] for artifact in left if artifact["type"] != "progress") == [
        "rich",
        "table",
        "table",
        "table",
    ]
    (report,) = [artifact for artifact in left if artifact["type"] == "rich"]
    assert report["key"] == "sft"
    assert report["data"]["html"].count("data:image/svg+xml") >= 3
    assert [artifact for artifact in left if artifact["type"] == "progress"] == [], (
        "they are shown while their stage runs"
    )
    assert run["name"].startswith(f"sft, seed 0, {overrides[0]}, ")


FLOW = """
import time
from uuid import UUID
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from alignment_core.tracking import Progress, listening
from alignment.flows import progress
from tests.tracking.watched import result

progress.AFTER_SECONDS = progress.EVERY_SECONDS = 0.0

@flow
def watched():
    run = UUID(runtime.flow_run.id)
    with listening({"progress artifacts": lambda: progress.ProgressArtifacts(run)}, print) as (listener,):
        for label in ("whole", "half"):
            listener.started(label)
            listener.progress(label, Progress(0, None, "rows", {}))
            listener.progress(label, Progress(1, 4, "steps", {}))
            listener.progress(label, Progress(2, 4, "steps", {}))
        listener.finished(result("whole"))
        with get_client(sync_client=True) as client:
            for _ in range(100):  # listeners are told by threads of their own
                shown = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [run]}))
                if [(row.type, row.key, row.description, row.data) for row in shown] == [("progress", None, "half", 50.0)]:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError(shown)
    print(run)

watched()
"""


def test_progress_of_a_long_stage_is_shown_on_the_run_until_its_end(services: Services) -> None:
    environment = {**services.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", FLOW], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = done.stdout.split()  # and no warning
    assert services.get("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}}) == [], "it is over"


LEFT_OPEN = """
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.states import Pending, Running
from alignment.flows.service.reconcile import mark

@flow(name="alignment")
def run(): ...

@task
def stage(): ...

with get_client(sync_client=True) as client:
    dead = client.create_flow_run(run, state=Running())
    for number, state in enumerate((Running(), Pending())):
        client.create_task_run(stage, dead.id, dynamic_key=str(number), state=state)
    client.create_artifact(ArtifactCreate(type="progress", description="sft", data=40.0, flow_run_id=dead.id))
    mark(client, dead, "its process is gone")
    print(dead.id)
"""


def test_the_tasks_of_a_dead_run_end(services: Services) -> None:
    environment = {**services.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tasks = services.get("/task_runs/filter", {"flow_runs": {"id": {"any_": done.stdout.split()}}})
    assert [task["state"]["type"] for task in tasks] == ["CRASHED", "CRASHED"]
    assert tasks[0]["state"]["message"] == "its process is gone"
    left = services.get("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": done.stdout.split()}}})
    assert left == [], "no progress bar of a stage that is not running"


def test_the_schedule_of_nights_makes_runs_appear_by_itself(services: Services) -> None:
    planned = eventually(lambda: runs_of(services, "nightly", "SCHEDULED"))
    assert {run["expected_start_time"][11:19] for run in planned} == {"02:00:00"}


def test_a_scheduled_night_runs_by_itself_and_sets_off_an_automation(services: Services, tmp_path: Path) -> None:
    trigger = {"type": "event", "expect": ["alignment.night.empty"], "posture": "Reactive", "threshold": 1, "within": 0}
    hook = {"name": "empty nights", "trigger": trigger, "actions": [{"type": "do-nothing"}]}
    services.prefect("automation", "create", "--from-json", json.dumps(hook))
    shipped = services.get("/deployments/name/alignment/nightly")
    recipe = shipped["parameter_openapi_schema"]["properties"]["recipe"]["default"]
    recipe["dpo"]["data"]["sources"][0]["path"] = str(tmp_path / "*.jsonl")
    schedule = {"schedule": {"interval": 20}, "parameters": {"recipe": recipe}}
    services.get(f"/deployments/{shipped['id']}/schedules", [schedule])
    (run, *_) = eventually(lambda: runs_of(services, "nightly", "COMPLETED", "FAILED", "CRASHED"))
    services.prefect("--no-prompt", "deployment", "schedule", "clear", "alignment/nightly", "--accept-yes")
    assert run["state"]["type"] == "COMPLETED"
    due = run["expected_start_time"][:19] + "Z"
    of_run = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
    assert f"Night {due}: empty" in [artifact["description"] for artifact in services.get("/artifacts/filter", of_run)]

    def triggered() -> Any:
        return services.get("/events/filter", {"filter": {"event": {"name": ["prefect.automation.triggered"]}}})[
            "events"
        ]

    assert eventually(triggered)[0]["resource"]["prefect.resource.name"] == "empty nights"
