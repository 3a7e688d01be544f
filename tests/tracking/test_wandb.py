"""Real W&B runs, offline, in a process that is watched from outside, as W&B itself reads them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment_core.errors import EnvironmentFault
from alignment_core.tracking import require
from alignment_core.tracking.wandb_artifacts import Artifacts
from tests.processes import processes_of, wait_until
from tests.tracking.watched import recipe_with

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys, time
from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageCall
from alignment_core.tracking import Progress, file_trackers, guard, listening
from tests.tracking.watched import recipe_with, result
how = json.loads(sys.argv[1])
guard.CLOSE_SECONDS = how.get("close", 60.0)
warn = lambda sentence: print(sentence, flush=True)
with file_trackers(recipe_with({"wandb": {"project": "tests", **how["wandb"]}}), warn, "/the/store") as trackers:
    with listening(trackers, warn) as (listener,):
        for step in how["steps"]:
            listener.progress("round-1/dpo", Progress(step, 10, "steps", {"loss": 1 / step, "grad_norm": None}))
        for label, state, inputs, outputs in how.get("stages", []):
            call = StageCall(stage="sft", label=label, config={}, inputs=inputs)
            outputs = {name: Reference.parse(text) for name, text in outputs.items()}
            listener.requested(call, "1" * 64)
            listener.produced(result(label).model_copy(update={"state": state, "outputs": outputs}))
        if how.get("crash"):
            time.sleep(600)
        listener.finished(result("round-1/dpo", loss=0.125, policies={"sft": {}}))
        listener.texts("samples", [{"prompt": "1+1", "sft": "2"}, {"prompt": "2+2", "round-1": "4"}])
"""
SECRET = "5ec4e7" * 6 + "abcd"

pytestmark = pytest.mark.slow


class Place:
    """A user's folders, to check the written files."""

    def __init__(self, root: Path) -> None:
        self.home, self.user, self.work, self.temporary = (root / n for n in ("align", "user", "work", "tmp"))
        for folder in (self.home, self.user, self.work, self.temporary):
            folder.mkdir()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        self.environment = {
            **inherited,
            "ALIGN_HOME": str(self.home),
            "HOME": str(self.user),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def start(self, steps: list[int], wandb: dict[str, Any] | None = None, **how: Any) -> subprocess.Popen[str]:
        arguments = json.dumps({"steps": steps, "wandb": wandb or {}, **how})
        command = [sys.executable, "-c", RUN, arguments]
        environment = {**self.environment, **how.get("environment", {})}
        return subprocess.Popen(
            command, cwd=self.work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, steps: list[int], wandb: dict[str, Any] | None = None, **how: Any) -> str:
        process = self.start(steps, wandb, **how)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        return printed

    def logs(self) -> list[Path]:
        return sorted(self.home.glob("tracking/*/wandb/offline-run-*/run-*.wandb"))

    def records(self, log: Path) -> list[dict[str, Any]]:
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        reader = {**self.environment, "TMPDIR": str(self.temporary.parent)}  # it leaves a log there
        done = subprocess.run(inspect, env=reader, capture_output=True, text=True, timeout=60)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def outside(self) -> list[Path]:
        places = (self.user, self.work, self.temporary)
        return [path for place in places for path in place.rglob("*") if "__pycache__" not in path.parts]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def points(records: list[dict[str, Any]]) -> list[tuple[float, float]]:
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    items = [item for item in items if "samples" not in str(item.keys())]
    return [(item["round-1/dpo/step"], item["round-1/dpo/loss"]) for item in items]


def test_a_run_without_a_login_is_recorded_offline_below_align_home_and_nowhere_else(place: Place) -> None:
    assert place.run([1, 2, 4], environment={"SOME_PASSWORD": SECRET}) == ""
    assert place.outside() == []
    (log,) = place.logs()
    records = place.records(log)
    assert points(records) == [(1, 1.0), (2, 0.5), (4, 0.25)]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["project"] == "tests"
    assert run["config"]["update"]["sft"]["data"]["sources"][0]["task"] == "reverse"
    assert run.get("host", "") == ""
    axes = {r["metric"]["name"]: r["metric"].get("step_metric") for r in records if r["type"] == "metric"}
    assert axes == {"round-1/dpo/step": None, "round-1/dpo/loss": "round-1/dpo/step"}
    assert {"round-1/dpo/loss": 0.125, "round-1/dpo/state": "run"}.items() <= _summary(records).items()
    assert [record["exit"].get("exit_code", 0) for record in records if record["type"] == "exit"] == [0]
    (table,) = [json.loads(path.read_text()) for path in place.home.rglob("samples*.table.json")]
    assert table == {"columns": ["prompt", "sft", "round-1"], "data": [["1+1", "2", ""], ["2+2", "", "4"]]}
    written = b"".join(path.read_bytes() for path in place.home.rglob("*") if path.is_file())
    assert SECRET.encode() not in written


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    return summary


def test_a_killed_run_leaves_no_process_and_keeps_its_metrics_and_resumes_under_its_id(place: Place) -> None:
    process = place.start([1, 2], crash=True)
    all_logged = lambda: bool(place.logs()) and len(points(place.records(place.logs()[0]))) == 2  # noqa: E731
    assert wait_until(all_logged, 180), process.poll()
    assert any("wandb-core" in line for line in processes_of(place.home).values())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert wait_until(lambda: not processes_of(place.home), 60), processes_of(place.home)
    assert place.outside() == []

    assert place.run([2, 3]) == ""
    before, after = place.logs()
    assert before.name == after.name
    assert points(place.records(before)) == [(1, 1.0), (2, 0.5)]
    assert points(place.records(after)) == [(3, 1 / 3)], "W&B has the point of step 2: each step is logged once"
    place.run([1])
    assert len({log.name for log in place.logs()}) == 2, "after success a new run begins"


def test_online_without_a_key_warns_and_records_offline(place: Place) -> None:
    printed = place.run([1], {"mode": "online"})
    assert printed.startswith("W&B: No API key configured")
    assert "`wandb sync`" in printed
    assert points(place.records(place.logs()[0])) == [(1, 1.0)]


def test_a_silent_server_delays_neither_the_run_nor_the_exit(place: Place) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        printed = place.run([1], close=1.0, environment={"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": url})
    assert printed == "W&B: does not finish; the run continues without it\n"
    assert wait_until(lambda: not processes_of(place.home), 60), processes_of(place.home)
    written = b"".join(path.read_bytes() for path in place.home.rglob("*") if path.is_file())
    assert SECRET.encode() not in written


ROWS, MODEL, LATER = (
    f"{kind}@sha256:{digit * 64}" for kind, digit in (("dataset", "1"), ("model", "2"), ("model", "3"))
)


def test_offline_the_outputs_of_stages_that_ran_are_artifacts_by_reference(place: Place) -> None:
    stages = [
        ("data", "cached", {}, {"dataset": ROWS}),
        ("sft", "run", {"train": ROWS}, {"model": MODEL, "same": MODEL}),
        ("dpo", "run", {"policy": MODEL, "train": ROWS}, {"model": LATER}),
    ]
    assert place.run([1], stages=stages) == ""
    (log,) = place.logs()
    artifacts = [record["artifact"] for record in place.records(log) if "artifact" in record]
    logged = [made for made in artifacts if made["type"] != "run_table"]  # of the samples
    assert [(made["name"], made["type"]) for made in logged] == [
        ("model-222222222222", "model"),
        ("model-333333333333", "model"),
    ]
    metadata = json.loads(logged[1]["metadata"])
    assert (metadata["reference"], metadata["store"], metadata["label"]) == (LATER, "/the/store", "dpo")
    assert metadata["inputs"] == {"policy": MODEL, "train": ROWS}
    ((entry,), _) = (made["manifest"]["contents"] for made in logged)
    assert entry["ref"] == f"align:{MODEL}"
    assert points(place.records(log)) == [(1, 1.0)]


class RecordingRun:
    """In place of W&B's run: no server of W&B runs here, and offline it refuses inputs."""

    offline = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def log_artifact(self, artifact: Any) -> None:
        self.calls.append(("log", artifact.name))

    def use_artifact(self, artifact: Any) -> None:
        self.calls.append(("use", artifact.name))
        if artifact.name.startswith("broken"):
            raise ValueError("no such project")


def entries(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "type": "model", "uri": f"align:{name}", "metadata": {}} for name in names]


def test_online_what_the_run_did_not_make_is_used_once_and_a_failure_is_one_sentence(tmp_path: Path) -> None:
    run, complaints = RecordingRun(), list[str]()
    artifacts = Artifacts(run, tmp_path, complaints.append)
    artifacts.record([], entries("broken-1", "broken-2"))
    artifacts.record(entries("sft"), entries("data"))
    artifacts.record(entries("dpo"), entries("sft", "data"))
    artifacts.close()
    assert sorted(run.calls) == sorted(
        [("use", "broken-1"), ("use", "broken-2"), ("use", "data"), ("log", "sft"), ("log", "dpo")]
    )
    assert complaints == ["artifacts of the run are incomplete: ValueError: no such project"]
    resumed = Artifacts(again := RecordingRun(), tmp_path, complaints.append)
    resumed.record(entries("dpo"), entries("sft"))
    resumed.close()
    assert again.calls == [], "a resumed run made them itself"


def test_a_missing_package_is_reported_with_field_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [
        recipe_with(tracking)
        for tracking in ({}, {"wandb": {"project": "p"}}, {"tensorboard": True}, {"openlineage": "f"})
    ]
    for package in ("wandb", "tensorboard", "openlineage"):
        (tmp_path / package).mkdir()  # W&B leaves such folders: they are no package
    for package in ("wandb", "tensorboard", "openlineage", "openlineage.client"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    none, wandb, tensorboard, openlineage = (recipe.tracking for recipe in recipes)
    require(none)
    with pytest.raises(
        EnvironmentFault, match=r"tracking\.wandb: the package wandb is not installed; install .*`tracking`"
    ):
        require(wandb)
    with pytest.raises(EnvironmentFault, match=r"tracking\.tensorboard"):
        require(tensorboard)
    with pytest.raises(EnvironmentFault, match=r"tracking\.openlineage: the package openlineage-python is not"):
        require(openlineage)
