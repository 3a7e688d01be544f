"""The default of `bf16`: true in a recipe that names GPUs, whatever machine reads it."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.recipes import BaseRecipe, ResourcesConfig, SftConfig, TrainingConfig, parse_recipe
from alignment_core.recipes.base import Config
from tests.recipes.test_section_defaults import MODEL, PAIRS, RL, parsed

GPUS = ("resources.device", "cuda")
DATA = {"data": "rows.jsonl"}
STUDENT = {"prompts": "p.jsonl"}


def trainings(section: Any, path: str = "") -> dict[str, bool]:
    """`bf16` of every training in a recipe, by its path."""
    if isinstance(section, TrainingConfig):
        return {path: section.bf16}
    by_path: dict[str, bool] = {}
    for name in type(section).model_fields if isinstance(section, Config) else ():
        by_path |= trainings(getattr(section, name), f"{path}.{name}" if path else name)
    return by_path


@pytest.mark.parametrize(
    ("method", "content", "expected"),
    [
        ("sft", {"sft": DATA}, {"sft.training": True}),
        ("sft", {"sft": {**DATA, "training": {"max_steps": 9}}}, {"sft.training": True}),
        ("sft", {"sft": {**DATA, "training": {"bf16": False}}}, {"sft.training": False}),
        ("sft", {"sft": {**DATA, "training": {"optimizer": "muon"}}}, {"sft.training": False}),
        ("dpo", {**PAIRS, "sft": DATA}, {"sft.training": True, "dpo.training": True}),
        ("rl", RL, {"rl.training": True}),
        ("reward-model", {"reward_model": DATA}, {"reward_model.training": True}),
        (
            "distillation",
            {"distillation": {"teacher": {"model": MODEL}, "on_policy": STUDENT}},
            {"distillation.training": False, "distillation.on_policy.training": True},
        ),
        ("continued-pretraining", {"continued_pretraining": DATA}, {"continued_pretraining.training": True}),
    ],
)
def test_a_recipe_for_gpus_trains_in_bf16_unless_it_says_otherwise(
    method: str, content: dict[str, Any], expected: dict[str, bool]
) -> None:
    recipe = parsed(method, content, GPUS)
    assert trainings(recipe) == expected
    assert not any(trainings(parsed(method, content)).values()), "the machine has no part in it"
    # Neither the default nor the sections that hold it count as set.
    written = {"method": method, "name": "a", "model": "some/model", **content, "resources": {"device": "cuda"}}
    read = recipe.model_dump(mode="json", exclude_unset=True)
    assert read == parse_recipe({**written, "resources": {}}).model_dump(mode="json", exclude_unset=True) | {
        "resources": {"device": "cuda"}
    }
    # Stored recipes have all fields, and keep their meaning.
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe
    stored = parsed(method, content).model_dump(mode="json") | {"resources": {"device": "cuda"}}
    assert not any(trainings(parse_recipe(stored)).values())


def test_an_existing_reward_model_is_not_trained_in_bf16() -> None:
    rl = parsed("rl", RL, GPUS, ("rl.rewards", [{"reward_model": "ours"}]), ("reward_model", {"model": MODEL}))
    assert parse_recipe(rl.model_dump(mode="json", exclude_unset=True), refuse_unused=True) == rl
    assert trainings(rl) == {"reward_model.training": False, "rl.training": True}


def test_engines_are_corrected_as_with_bf16_in_the_recipe() -> None:
    default, explicit = parsed("rl", RL, GPUS), parsed("rl", RL, GPUS, ("rl.training.bf16", True))
    assert default.rl.importance_sampling_correction.mode == "mask"
    assert default == explicit
    assert "bf16" not in default.rl.training.model_fields_set


def test_branches_of_a_comparison_follow_the_comparison() -> None:
    content = {"branches": {"a": {"method": "dpo", **PAIRS}}, "evaluation": {"prompts": "p.jsonl"}}
    recipe: Any = parsed("comparison", content, GPUS)
    assert trainings(recipe.recipes["a"]) == {"dpo.training": True}
    assert "resources" not in recipe.branches["a"]


def test_sections_that_are_made_in_python_have_the_default_too() -> None:
    made = SftConfig.model_validate(DATA)
    read = parsed("sft", {"sft": DATA}, GPUS)
    again = type(read)(method="sft", name="a", model=read.model, sft=made, resources=ResourcesConfig(device="cuda"))
    assert isinstance(again, BaseRecipe)
    assert again == read
    assert made.training.bf16 is False, "the section itself is unchanged"
