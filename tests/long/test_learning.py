"""The README's commands, and the promise behind them: with three seeds every round of DPO raises held-out accuracy."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.align import Align

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "quickstart.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user") / ".alignment"  # where it is by default


def shell(home: Path, *command: str) -> str:
    """Run a command as a new user would, in the checkout, with the environment that make created first on the path."""
    others = {name: value for name, value in os.environ.items() if name != "ALIGN_HOME"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**others, "HOME": str(home.parent), "PATH": path},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def check_that_it_learned(outcome: dict[str, Any]) -> None:
    policies = outcome["metrics"]["policies"]
    accuracy = {name: metrics["accuracy"] for name, metrics in policies.items()}
    assert accuracy["sft"] < accuracy["round-1"] < accuracy["round-2"], accuracy
    assert accuracy["round-2"] >= accuracy["sft"] + 0.10, accuracy
    assert policies["round-2"]["accuracy.low"] > policies["sft"]["accuracy.high"], policies
    assert policies["round-2"]["win_rate.low"] > 0.5
    assert outcome["metrics"]["reward model, held-out accuracy"] >= 0.9


def test_make_demo_learns_and_promotes_and_a_second_one_is_cached(align: Align, home: Path) -> None:
    printed = shell(home, "make", "demo")
    assert "Results on held-out prompts" in printed
    assert "policy/production: promoted" in printed
    again = align(home, "run", str(RECIPE))
    assert {stage["state"] for stage in again["stages"]} == {"cached"}
    assert again["promotion"]["state"] == "unchanged"
    check_that_it_learned(again)
    assert align(home, "tags", "ls") == {"tags": {"policy/production": again["outputs"]["policy"]}}


def test_the_commands_of_the_readme_work_after_the_demo(home: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [
        line.partition("#")[0].strip() for line in re.findall(r"^align (?:artifacts|lineage|tags).*$", readme, re.M)
    ]
    assert len(commands) >= 6
    for command in commands:
        assert shell(home, *shlex.split(command)).strip(), f"{command} printed nothing"


@pytest.mark.parametrize("seed", [2, 3])
def test_other_seeds_learn_too(align: Align, home: Path, seed: int) -> None:
    tag = f"promotion.tag=policy/seed-{seed}"  # the demo's own need not be worse by the gate's margin
    outcome = align(home, "run", str(RECIPE), "--set", f"seed={seed}", "--set", tag, timeout=850)
    check_that_it_learned(outcome)
    assert outcome["promotion"]["state"] == "promoted"


@pytest.mark.parametrize(("name", "gain"), [("grpo", 0.3), ("rlhf", 0.2)])
def test_reinforcement_learning_from_the_same_sft_model_learns(
    align: Align, home: Path, name: str, gain: float, measured: Callable[[str], None]
) -> None:
    outcome = align(home, "run", str(RECIPE.with_name(f"{name}.yaml")), "--set", f"promotion.tag=policy/{name}")
    states = {stage["label"]: stage["state"] for stage in outcome["stages"]}
    assert states["sft"] == "cached", "the demo made it"
    before, after = (outcome["metrics"]["policies"][policy] for policy in ("sft", "rl"))
    measured(f"accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}, KL {after['kl']:.2f} nats")
    assert after["accuracy"] >= before["accuracy"] + gain
    assert after["accuracy.low"] > before["accuracy.high"]
    assert outcome["promotion"]["state"] == "promoted"
