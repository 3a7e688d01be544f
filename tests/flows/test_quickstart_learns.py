"""The quickstart as shipped: with three seeds every round of DPO raises the accuracy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_round_improves_and_the_last_is_promoted(
    align: Callable[..., dict[str, Any]], home: Path, seed: int
) -> None:
    outcome = align(home, "run", str(RECIPE), "--set", f"seed={seed}", timeout=850)
    policies = outcome["metrics"]["policies"]
    accuracy = {name: metrics["accuracy"] for name, metrics in policies.items()}
    assert accuracy["sft"] < accuracy["round-1"] < accuracy["round-2"], accuracy
    assert accuracy["round-2"] >= accuracy["sft"] + 0.10, accuracy
    assert policies["round-2"]["accuracy.low"] > policies["sft"]["accuracy.high"], policies
    assert policies["round-2"]["win_rate.low"] > 0.5
    assert outcome["metrics"]["reward model, held-out accuracy"] >= 0.9
    assert outcome["promotion"]["state"] == "promoted"
    assert align(home, "tags", "ls") == {"tags": {"policy/production": outcome["outputs"]["policy"]}}
