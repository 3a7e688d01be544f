"""The nearest placement that fits, and what a recipe's sections are read as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.hardware import hardware_of
from alignment_core.capacity.report import capacity
from alignment_core.capacity.workload import Lengths, Reinforcement, Sampling, Training, work_of
from alignment_core.errors import UserError
from alignment_core.recipes import load_recipe
from tests.capacity.shapes import QWEN_2_5_7B, llama, ppo, recipe_of


def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, ppo({"zero_stage": 3, "offload_optimizer": True}))
    result = capacity(work_of(recipe, Lengths()), recipe.resources, _cluster(8), price=2.0)
    assert result.problems == []
    assert result.alternative is None
    assert result.gpu_hours == pytest.approx(8 * 10 * result.estimates[0].step / 3600)
    assert result.as_object()["money"] == pytest.approx(2.0 * 8 * 10 * result.estimates[0].step / 3600)


@pytest.mark.parametrize(
    ("resources", "changes"),
    [({}, {"zero_stage": 3}), ({"offload_while_sampling": False}, {"zero_stage": 3, "offload_optimizer": True})],
    ids=["trainers rest while engines sample", "they do not"],
)
def test_the_nearest_placement_of_7b_splits_more(
    resources: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, ppo(resources))
    result = capacity(work_of(recipe, Lengths()), recipe.resources, _cluster(8))
    assert "rl: a GPU of the policy needs" in result.problems[0]
    assert result.alternative is not None
    assert result.alternative.changes == changes
    again = capacity(work_of(recipe, Lengths()), result.alternative.resources, _cluster(8))
    assert again.problems == []


def test_an_engine_of_70b_needs_several_gpus(tmp_path: Path) -> None:
    content = ppo({"zero_stage": 3, "offload_optimizer": True, "models": {"reward": {"gpus": 8, "zero_stage": 3}}})
    recipe = recipe_of(tmp_path, content)
    cluster = Cluster(hardware_of("h100"), 64, llama("70B"))
    result = capacity(work_of(recipe, Lengths()), recipe.resources, cluster)
    assert "an engine needs" in result.problems[0]
    assert result.alternative is not None
    assert result.alternative.changes["tensor_parallel_size"] in (4, 8)


def test_a_reward_model_of_70b_is_split_over_gpus_of_its_own(tmp_path: Path) -> None:
    """Whole it has 138 GB; over 4 GPUs 34.5 GB each, and over 8 17.3 GB, which leave room for its passes."""
    recipe = recipe_of(tmp_path, ppo({"tensor_parallel_size": 8, "zero_stage": 3}))
    cluster = Cluster(hardware_of("h100"), 64, llama("70B"))
    result = capacity(work_of(recipe, Lengths()), recipe.resources, cluster)
    assert "reward_model 138.0 GB" in result.problems[0]
    assert result.alternative is not None
    reward = result.alternative.changes["models"]["reward"]
    assert reward["zero_stage"] == 3
    assert reward["gpus"] in (4, 8)
    peaks = {peak.where: peak for peak in result.alternative.estimates[0].peaks}
    assert peaks["reward"].parts["reward_model"] == pytest.approx(138e9 / reward["gpus"], rel=0.01)


def test_long_completions_are_computed_by_several_ranks_together(tmp_path: Path) -> None:
    content = ppo({"zero_stage": 3, "gpu_memory_utilization": 0.9, "offload_optimizer": True})
    content["rl"] |= {"generation": {"num_generations": 1, "max_completion_length": 300_000}}
    content["rl"] |= {"rewards": [{"verifier": "math"}]}
    recipe = recipe_of(tmp_path, content)
    result = capacity(work_of(recipe, Lengths()), recipe.resources, _cluster(8))
    assert "activations" in result.problems[0]
    assert result.alternative is not None
    assert result.alternative.changes.keys() == {"sequence_parallel_size"}


def test_more_gpus_than_there_are_is_a_problem(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, ppo({"models": {"critic": {"gpus": 8}, "reference": {"gpus": 8}}}))
    [problem] = capacity(work_of(recipe, Lengths()), recipe.resources, _cluster(8)).problems
    assert "need 17 GPUs, and there are 8" in problem


def test_asynchronous_sampling_costs_the_longer_of_the_two(tmp_path: Path) -> None:
    content: dict[str, Any] = ppo({"placement": "disaggregated", "zero_stage": 3, "offload_optimizer": True})
    together = recipe_of(tmp_path, content)
    apart = recipe_of(tmp_path, {**content, "rl": {**content["rl"], "execution": {"max_staleness": 1}}})
    steps = [
        capacity(work_of(recipe, Lengths()), recipe.resources, _cluster(16)).estimates[0]
        for recipe in (together, apart)
    ]
    parts = steps[0].seconds
    beside = parts["sample"] + parts["reward"]
    rest = parts["logps"] + parts["train"] + parts["optimiser"]
    assert steps[1].step == pytest.approx(max(beside, rest) + parts["transfer"])


def test_a_sequence_that_is_too_long_for_a_gpu_is_computed_by_several(tmp_path: Path) -> None:
    """By hand: 2 bytes for each of 131,072 tokens, 28 layers and 3,584 units, and 34 of one layer, are 42 GB."""
    content = {"method": "sft", "sft": {"data": {"path": "some/rows"}, "training": {"bf16": True}}}
    recipe = recipe_of(tmp_path, {**content, "resources": {"zero_stage": 3, "gradient_checkpointing": True}})
    works = work_of(recipe, Lengths(row=131_072))
    result = capacity(works, recipe.resources, _cluster(8))
    alone = 131_072 * 3584 * (2 * 28 + 34)
    assert result.estimates[0].roles[0].terms["activations"] == alone
    wide = recipe.resources.model_copy(update={"sequence_parallel_size": 4})
    assert capacity(works, wide, _cluster(8)).estimates[0].roles[0].terms["activations"] == alone / 4
    longer = capacity(work_of(recipe, Lengths(row=524_288)), recipe.resources, _cluster(8))
    assert longer.problems
    assert longer.alternative is not None
    assert longer.alternative.changes == {"sequence_parallel_size": 4}


def test_ranks_that_share_layers_have_a_part_of_weights_and_activations(tmp_path: Path) -> None:
    """By hand: of each parameter but those of embedding and head 16 bytes, divided by 4 ranks, and by 2 groups from ZeRO 1 on
    for 12 of them; of a layer's activations 10 bytes and a fourth of 24."""
    content = {"method": "sft", "sft": {"data": {"path": "some/rows"}, "training": {"bf16": True}}}
    placement = {"zero_stage": 1, "gradient_checkpointing": False, "trainer_tensor_parallel_size": 4}
    recipe = recipe_of(tmp_path, {**content, "resources": placement})
    cluster = _cluster(8)
    (role,) = capacity(work_of(recipe, Lengths(row=512)), recipe.resources, cluster).estimates[0].roles
    model = cluster.model
    outer = model.vocabulary * model.hidden + model.embedding
    count = outer + (model.parameters - outer) / 4
    assert role.terms["weights"] == 2 * count
    assert role.terms["gradients"] == 4 * count
    assert role.terms["optimiser"] == pytest.approx(12 * count / 2)
    assert role.terms["activations"] == pytest.approx(8192 * model.hidden * 28 * (10 + 24 / 4))


RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"


@pytest.mark.parametrize(
    "file", [*RECIPES.glob("gpu/*.yaml"), *RECIPES.glob("node/*.yaml")], ids=lambda file: file.stem
)
def test_every_recipe_for_gpus_has_work(file: Path) -> None:
    works = work_of(load_recipe(file), Lengths(rows=10_000))
    assert works
    for work in works:
        assert isinstance(work, Training | Sampling | Reinforcement)
        if isinstance(work, Training):
            assert work.steps


def test_a_model_without_the_usual_fields_is_refused() -> None:
    with pytest.raises(UserError, match=r"--config: the model's config\.json does not describe a decoder"):
        Architecture.of({"model_type": "mamba", "d_model": 1024})


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match="--kind v100: no such GPU is known here; use one of a100, "):
        hardware_of("v100")


def _cluster(gpus: int) -> Cluster:
    return Cluster(hardware_of("h100"), gpus, Architecture.of(QWEN_2_5_7B))
