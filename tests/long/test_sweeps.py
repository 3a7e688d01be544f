"""Sweeps and custom flows in unusual conditions: killed, side by side in a home, of reinforcement learning, in S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.align import references, run_align, states
from tests.flows.test_sweep import RECIPE
from tests.pages import DOCS, files_of
from tests.processes import processes_of, wait_until
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
BETAS = ("--sweep", "dpo.loss.beta=0.05,0.5")
RL: dict[str, Any] = {
    "method": "rl",
    "name": "numbers",
    "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}},
    "rl": {
        "prompts": {"task": "first", "rows": 64},
        "steps": 3,
        "prompts_per_step": 4,
        "generation": {"num_generations": 2, "max_completion_length": 4},
        "rewards": [{"verifier": "task"}],
        "training": {"batch_size": 8},
    },
    "evaluation": RECIPE["evaluation"],
}


def begun(home: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "alignment.flows.cli.main", *arguments, "--json"]
    environment = {**os.environ, "ALIGN_HOME": str(home)}
    with (folder / f"{home.name}.{len(list(folder.iterdir()))}.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def outcome(run: subprocess.Popen[str]) -> dict[str, Any]:
    printed, _ = run.communicate(timeout=900)
    assert run.returncode == 0, printed[-3000:]
    outcome: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return outcome


def finished(home: Path) -> int:
    """How many stages a home's store has."""
    return len([*home.glob("store/stages/**/*.json")])


def test_a_sweep_killed_twice_gives_the_artifacts_of_an_undisturbed_sweep(tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(RECIPE))
    alone = run_align(tmp_path / "alone", "run", str(file), *BETAS)
    home = tmp_path / "killed"
    for after, arguments in ((3, ("run", str(file), *BETAS)), (8, ("resume", "last"))):
        run = begun(home, tmp_path, *arguments)
        assert wait_until(lambda after=after: finished(home) >= after, 300)  # type: ignore[misc]
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert wait_until(lambda: not processes_of(home), 60)
    resumed = run_align(home, "resume", "last")
    undisturbed, after_kills = references(alone), references(resumed)
    reports = {label for label in undisturbed if label.endswith("report")}  # these say when
    assert {label: undisturbed[label] for label in undisturbed.keys() - reports} == {
        label: after_kills[label] for label in after_kills.keys() - reports
    }
    assert resumed["metrics"]["best"] == alone["metrics"]["best"]


def test_custom_flows_and_a_sweep_in_a_shared_home_compute_each_stage_once(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    folder.mkdir()
    (folder / "two_betas.py").write_text(files_of(DOCS / "flows.md")["two_betas.py"])
    (folder / "pairs.json").write_text(json.dumps(RECIPE))
    runs = [
        begun(home, folder, "run", "two_betas.py"),
        begun(home, folder, "run", "two_betas.py"),
        begun(home, folder, "run", "pairs.json", *BETAS),
    ]
    first, second, sweep = map(outcome, runs)
    assert {outcome["status"] for outcome in (first, second, sweep)} == {"completed"}
    ran = [label for outcome in (first, second) for label, state in states(outcome).items() if state == "run"]
    shared = [label for label in ran if label.endswith(("sft", "dpo", "data", "pairs", "generate"))]
    assert len(shared) == len(set(shared)), "a shared stage is computed by one of the runs"
    assert references(first)["beta-0.5/dpo"] == references(second)["beta-0.5/dpo"]


def test_a_sweep_of_reinforcement_learning_runs_to_its_end_in_s3(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(RL))
    where = ("--store", f"s3://bucket/{tmp_path.name}")
    arguments = ("run", str(file), "--sweep", "rl.training.learning_rate=1e-4,1e-3", *where)
    done = run_align(tmp_path / "home", *arguments)
    assert len(done["metrics"]["variants"]) == 2
    trained = [label for label in states(done) if label.rpartition("/")[2] == "rl"]
    assert len(trained) == 2, states(done)
    elsewhere = run_align(tmp_path / "other", *arguments)
    assert {state for label, state in states(elsewhere).items() if not label.endswith("report")} == {"cached"}
