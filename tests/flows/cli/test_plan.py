"""`align plan`: the cost of a recipe on hardware that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.align import align_here
from tests.capacity.shapes import QWEN_2_5_7B


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN_2_5_7B))
    return file


def test_a_recipe_that_fits(tmp_path: Path, config: Path) -> None:
    done = align_here(tmp_path, "plan", "deployments/recipes/node/grpo.yaml", "--config", str(config), "--price", "2.5")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "7.62B parameters on 8 h100, of which 8 are used"
    assert any("GPU hours" in line and "at 2.5 an hour" in line for line in lines)


def test_a_recipe_that_does_not_fit_ends_with_1_and_the_nearest_placement(tmp_path: Path, config: Path) -> None:
    options = ["--config", str(config), "--set", "resources.zero_stage=2", "--set", "resources.offload_optimizer=false"]
    done = align_here(tmp_path, "plan", "deployments/recipes/node/ppo.yaml", *options, "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["status"] == "does not fit"
    assert result["problems"][0].startswith("rl: a GPU of the policy needs ")
    assert result["nearest"]["changes"] == {"zero_stage": 3}, "the trainers rest while engines sample"
    assert {"stage", "parts", "tokens_per_step", "memory"} <= result["stages"][0].keys()


def test_a_model_of_the_recipe_needs_no_config(tmp_path: Path) -> None:
    done = align_here(tmp_path, "plan", "quickstart", "--gpus", "1", "--rows", "1000", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert [stage["stage"] for stage in result["stages"]][:2] == ["sft", "reward_model"]
    assert result["seconds"] > 0
    assert result["money"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--kind", "v100"], "--kind v100: no such GPU is known here"),
        (["--kind", "cpu"], "--kind cpu: processors have no datasheet here"),
        (["--config", "missing.json"], "--config missing.json: cannot be read as JSON"),
        (["--like", "no-such-run"], "no run yet in "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = align_here(tmp_path, "plan", "quickstart", *options)
    assert done.returncode == 2
    assert sentence in done.stderr
