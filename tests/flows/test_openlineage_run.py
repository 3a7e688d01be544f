"""OpenLineage's events of real runs: one that fails, its resumption, and another that finds stages cached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.align import Align, align_here, references, states
from tests.conftest import TinyModel
from tests.tracking.test_openlineage import read

RECIPE = """
method: sft
name: small
model: {{name: {model}}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 32, max_steps: 2}}}}
resources: {{trainers: 1, engines: 1, threads: 1}}
tracking: {{openlineage: events.ndjson}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "small.yaml").write_text(RECIPE.format(model=tiny_model()))
    return home


def seen(events: list[dict[str, Any]]) -> set[tuple[str, str, bool]]:
    return {
        (event["job"]["name"], event["eventType"], event["run"]["facets"]["alignment_stage"]["cached"])
        for event in events
    }


@pytest.mark.exhaustive
def test_each_stage_begins_and_ends_once_in_every_attempt(align: Align, home: Path) -> None:
    recipe, file = str(home / "small.yaml"), home / "events.ndjson"
    align(home, "run", recipe, "--set", "sft.training.max_loss=0.000001", expect=1)
    failed = read(file)
    made = {(label, state, False) for label in ("model", "sft/data") for state in ("START", "COMPLETE")}
    assert seen(failed) == made | {("sft", "START", False), ("sft", "FAIL", False)}
    assert len(failed) == 6
    (error,) = [event["run"]["facets"]["errorMessage"]["message"] for event in failed if event["eventType"] == "FAIL"]
    assert "max_loss" in error

    align(home, "resume", "last", expect=1)
    resumed = read(file)[6:]
    cached = {(label, state, True) for label in ("model", "sft/data") for state in ("START", "COMPLETE")}
    assert seen(resumed) == cached | {("sft", "START", False), ("sft", "FAIL", False)}
    assert len(resumed) == 6
    assert len({event["run"]["runId"] for event in (*failed, *resumed)}) == 6, "`align resume` is another run"

    outcome = align(home, "run", recipe, "--set", f"tracking.openlineage={home}/other.ndjson")
    assert states(outcome) == {"model": "cached", "sft/data": "cached", "sft": "run"}, "trackers are not in the key"
    events = read(home / "other.ndjson")
    assert seen(events) == cached | {("sft", "START", False), ("sft", "COMPLETE", False)}
    assert len(events) == 6
    ends = {event["job"]["name"]: event for event in events if event["eventType"] == "COMPLETE"}
    made_here = references(outcome)
    assert [made["name"] for made in ends["sft"]["outputs"]] == [made_here["sft"]]
    assert {used["name"] for used in ends["sft"]["inputs"]} == {made_here["model"], made_here["sft/data"]}

    exported = {
        event["job"]["name"]: event
        for event in map(
            json.loads, align_here(home, "lineage", made_here["sft"], "--format", "openlineage").stdout.splitlines()
        )
    }
    assert list(exported) == ["model", "sft/data", "sft"] or list(exported) == ["sft/data", "model", "sft"]
    assert exported["sft"]["run"]["runId"] == ends["sft"]["run"]["runId"]
    assert exported["sft"]["job"]["namespace"] == "small"
    first = {event["job"]["name"]: event["run"]["runId"] for event in failed}
    assert exported["sft/data"]["run"]["runId"] == first["sft/data"]
    record = ends["sft/data"]["run"]["facets"]["alignment_stage"]["record"]
    assert record == exported["sft/data"]["run"]["facets"]["alignment_stage"]["key"]


def test_a_server_that_is_gone_fails_no_run_and_wandb_has_what_the_run_made(align: Align, home: Path) -> None:
    changes = ("seed=5", "tracking.openlineage=http://127.0.0.1:9", "tracking.wandb={project: p, mode: offline}")
    outcome = align(home, "run", str(home / "small.yaml"), *(part for change in changes for part in ("--set", change)))
    assert outcome["status"] == "completed"
    ran = [label for label, state in states(outcome).items() if state == "run"]
    assert "sft" in ran
    (log,) = home.glob("tracking/*/wandb/offline-run-*/run-*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    lines = subprocess.run(inspect, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    logged = [
        json.loads(record["artifact"].get("metadata", "{}"))
        for record in map(json.loads, lines)
        if "artifact" in record
    ]
    made = {artifact["label"]: artifact for artifact in logged if "label" in artifact}
    assert sorted(made) == sorted(ran)
    assert made["sft"]["store"] == str(home / "store")
    assert made["sft"]["reference"] == references(outcome)["sft"]
    assert set(made["sft"]["inputs"].values()) == {references(outcome)[label] for label in ("model", "sft/data")}
