"""Every method learns on the built-in tasks, with three seeds, by the margin that is stated here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.align import Align

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
SEEDS = (1, 2, 3)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user") / ".alignment"


def policies(align: Align, home: Path, recipe: str, seed: int, *more: str) -> dict[str, Any]:
    sets = (f"seed={seed}", "promotion=null", *more)
    path = str(RECIPES / f"{recipe}.yaml")
    outcome = align(home, "run", path, *(word for override in sets for word in ("--set", override)), timeout=850)
    metrics: dict[str, Any] = outcome["metrics"]["policies"]
    return metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("recipe", "before", "after", "margin"),
    [
        ("kto", "start", "kto", 0.2),
        ("rejection-sampling", "sft", None, 0.4),
        ("conditional-sft", "sft", "wanted", 0.4),
        ("distillation", "start", "student", 0.9),
    ],
)
def test_a_method_raises_held_out_accuracy(
    align: Align, home: Path, recipe: str, before: str, after: str | None, margin: float, seed: int
) -> None:
    metrics = policies(align, home, recipe, seed)
    first, last = metrics[before], metrics[after or list(metrics)[-1]]
    assert last["accuracy"] >= first["accuracy"] + margin, {
        name: policy["accuracy"] for name, policy in metrics.items()
    }
    assert last["accuracy.low"] > first["accuracy.high"]
    if recipe == "conditional-sft":
        assert metrics["wanted-2"]["accuracy"] <= metrics["sft"]["accuracy"] - 0.2, "wrong answers were requested"
    if recipe == "distillation":
        assert metrics["student"]["accuracy"] >= metrics["teacher"]["accuracy"] - 0.03, "half of its rows are wrong"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_branch_of_a_comparison_beats_the_start(align: Align, home: Path, seed: int) -> None:
    metrics = policies(align, home, "comparison", seed)
    assert list(metrics) == ["sft", "dpo", "kto", "rejection-sampling", "ppo"]
    for name in list(metrics)[1:]:
        assert metrics[name]["win_rate.low"] > 0.5, name
        assert metrics[name]["accuracy"] >= metrics["sft"]["accuracy"] + 0.1, name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_reward_model_chooses_better_answers_than_an_outcome_reward_model(
    align: Align, home: Path, seed: int
) -> None:
    path = str(RECIPES / "process-reward-model.yaml")
    outcome = align(home, "run", path, "--set", f"seed={seed}", timeout=850)
    (best,) = (stage["metrics"] for stage in outcome["stages"] if stage["stage"] == "best_of_n")
    assert best["n"] == 8
    by_steps, *_, by_outcome = (best[name] for name in sorted(best) if name.startswith("best_"))
    assert by_steps >= by_outcome + 0.08, best
    assert by_steps >= outcome["metrics"]["policies"]["sft"]["accuracy"] + 0.3
