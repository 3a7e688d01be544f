"""The deployment commands of the README against a real Prefect server and a real process worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
OVERRIDES = [
    "sft.training.max_steps=4",
    "reward_model.training.max_steps=4",
    "iterative_dpo.rounds=1",
    "iterative_dpo.prompts_per_round=24",
    "iterative_dpo.training.max_steps=2",
    "iterative_dpo.selection.min_margin=0",
    *(f"sft.data.sources.{i}.rows=100" for i in range(3)),
    *(f"reward_model.data.sources.{i}.rows=60" for i in range(3)),
    *(f"iterative_dpo.prompts.sources.{i}.rows=20" for i in range(3)),
    *(f"evaluation.prompts.sources.{i}.rows=8" for i in range(3)),
    "reward_model.data.test_rows=20",
    "promotion.gates=[]",
    "resources.engines=1",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server:
    """A Prefect server and a worker on loopback, with files of their own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.home = home
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "ALIGN_HOME": str(home / "align"),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_CLI_PROMPT": "false",
            "DO_NOT_TRACK": "1",
        }

    def start(self, *arguments: str) -> None:
        log = (self.home / f"{arguments[0]}.log").open("wb")
        self.processes.append(
            subprocess.Popen(
                [PREFECT, *arguments], env=self.environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        )

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.environment['PREFECT_API_URL']}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError((self.home / "server.log").read_text()[-2000:])

    def prefect(self, *arguments: str, timeout: float = 600) -> str:
        done = subprocess.run(
            [PREFECT, *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def get(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("deploy"))
    try:
        running.start("server", "start", "--host", "127.0.0.1", "--port", str(running.port))
        running.wait_until_it_answers()
        running.prefect("work-pool", "create", "alignment", "--type", "process")
        running.prefect("--no-prompt", "deploy", "--all")
        running.start("worker", "start", "--pool", "alignment")
        yield running
    finally:
        running.stop()


def runs_of(server: Server, deployment: str, *states: str) -> list[Any]:
    """The flow runs of a deployment, those in these states if any are given."""
    chosen: dict[str, Any] = {"deployments": {"name": {"any_": [deployment]}}}
    if states:
        chosen["flow_runs"] = {"state": {"type": {"any_": list(states)}}}
    return server.get("/flow_runs/filter", chosen)


def eventually(look: Callable[[], Any], seconds: float = 180) -> Any:
    """What ``look`` returns, once that is something."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1)
    return found


def test_every_deployment_of_the_file_is_registered(server: Server) -> None:
    names = {found["name"] for found in server.get("/deployments/filter", {})}
    assert names == {"quickstart", "iterative-dpo", "sft", "reward-model", "dpo", "nightly"}


def test_the_run_form_shows_typed_described_fields_with_the_shipped_defaults(server: Server) -> None:
    deployment = server.get("/deployments/name/alignment/iterative-dpo")
    schema = deployment["parameter_openapi_schema"]
    section = schema["definitions"]["IterativeDpoConfig"]["properties"]
    assert section["rounds"]["type"] == "integer"
    assert section["rounds"]["description"] == "Number of rounds."
    assert schema["properties"]["recipe"]["default"]["model"]["name"] == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_deployment_runs_to_completion_with_parameters(server: Server) -> None:
    parameter = f"overrides={json.dumps(OVERRIDES)}"
    server.prefect("deployment", "run", "alignment/quickstart", "--param", parameter, "--watch")
    (run,) = runs_of(server, "quickstart")
    assert run["state"]["type"] == "COMPLETED"
    tasks = server.get("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {"round-1/dpo", "reward-model", "sft"} <= {task["name"] for task in tasks}
    left = server.get("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert sorted(one["type"] for one in left if one["type"] != "progress") == ["markdown", "table", "table"]
    assert {one["data"] for one in left if one["type"] == "progress"} <= {100.0}  # of stages that took their time


FLOW = """
from uuid import UUID
from prefect import flow, runtime
from alignment_core.tracking import Progress, listening
from flows import progress
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
    print(run)

watched()
"""


def test_a_stage_that_takes_its_time_shows_its_progress_on_the_run_to_the_end(server: Server) -> None:
    environment = {**server.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", FLOW], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = done.stdout.split()  # and no warning
    shown = server.get("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
    assert {one["description"]: one["data"] for one in shown} == {"whole": 100.0, "half": 50.0}
    assert {(one["type"], one["key"]) for one in shown} == {("progress", None)}


def test_the_schedule_of_nights_makes_runs_appear_by_itself(server: Server) -> None:
    planned = eventually(lambda: runs_of(server, "nightly", "SCHEDULED"))
    assert {run["expected_start_time"][11:19] for run in planned} == {"02:00:00"}


def test_a_scheduled_night_runs_by_itself_and_sets_off_an_automation(server: Server, tmp_path: Path) -> None:
    trigger = {"type": "event", "expect": ["alignment.night.empty"], "posture": "Reactive", "threshold": 1, "within": 0}
    hook = {"name": "empty nights", "trigger": trigger, "actions": [{"type": "do-nothing"}]}
    server.prefect("automation", "create", "--from-json", json.dumps(hook))
    shipped = server.get("/deployments/name/alignment/nightly")
    recipe = shipped["parameter_openapi_schema"]["properties"]["recipe"]["default"]
    recipe["dpo"]["data"]["sources"][0]["path"] = str(tmp_path / "*.jsonl")
    schedule = {"schedule": {"interval": 20}, "parameters": {"recipe": recipe}}
    server.get(f"/deployments/{shipped['id']}/schedules", [schedule])
    (run, *_) = eventually(lambda: runs_of(server, "nightly", "COMPLETED", "FAILED", "CRASHED"))
    server.prefect("--no-prompt", "deployment", "schedule", "clear", "alignment/nightly", "--accept-yes")
    assert run["state"]["type"] == "COMPLETED"
    due = run["expected_start_time"][:19] + "Z"
    of_run = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
    assert f"Night {due}: empty" in [found["description"] for found in server.get("/artifacts/filter", of_run)]

    def triggered() -> Any:
        return server.get("/events/filter", {"filter": {"event": {"name": ["prefect.automation.triggered"]}}})["events"]

    assert eventually(triggered)[0]["resource"]["prefect.resource.name"] == "empty nights"
