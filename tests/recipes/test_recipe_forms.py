"""Parsed recipes: short forms and defaults, the shipped recipes, and every configuration class."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from pydantic import ValidationError

import alignment_core.recipes
from alignment_core.methods.dpo import DpoRecipe
from alignment_core.methods.iterative_dpo import IterativeDpoRecipe
from alignment_core.recipes import load_recipe
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import METHODS
from tests.recipes.contents import ROUNDS, SFT

SHIPPED = sorted((Path(__file__).parents[2] / "deployments" / "recipes").rglob("*.yaml"))


# ---------------------------------------------------------------- shorthand and defaults


@pytest.mark.parametrize(
    "short",
    [
        "rows.jsonl",
        ["rows.jsonl"],
        [{"path": "rows.jsonl"}],
        {"path": "rows.jsonl"},
        {"sources": ["rows.jsonl"]},
        {"sources": [{"path": "rows.jsonl"}]},
    ],
)
def test_all_forms_of_one_source_mean_the_same(load, short):
    assert load(SFT | {"sft": {"data": short}}) == load(SFT)


def test_a_short_source_shares_its_mapping_with_the_data_set(load):
    data = load(SFT | {"sft": {"data": {"task": "reverse", "rows": 9, "test_rows": 2}}}).sft.data
    assert (data.sources[0].task, data.sources[0].rows, data.test_rows) == ("reverse", 9, 2)


def test_a_recipe_without_a_reward_model_may_be_judged_by_a_verifier(load):
    content = ROUNDS | {"reward_model": None, "evaluation": {"prompts": "p", "verifier": "checks.py:right"}}
    recipe = load(content, "iterative_dpo.selection.score=verifier")
    assert isinstance(recipe, IterativeDpoRecipe)
    assert recipe.reward_model is None


def test_preference_training_has_a_smaller_default_learning_rate(load):
    recipe = load({"method": "dpo", "name": "d", "model": "m", "dpo": {"data": "pairs.jsonl"}})
    assert isinstance(recipe, DpoRecipe)
    assert recipe.dpo.training.learning_rate == 1e-6


# ---------------------------------------------------------------- the recipes that come with the project


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_is_named_like_its_file_and_survives_a_round_trip(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert alignment_core.recipes.parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_every_method_has_a_shipped_recipe():
    assert {load_recipe(path).method for path in SHIPPED} == set(METHODS.names())


# ---------------------------------------------------------------- every configuration class


def configs() -> list[type[Config]]:
    for module in pkgutil.walk_packages(alignment_core.recipes.__path__, "alignment_core.recipes."):
        importlib.import_module(module.name)
    configs, waiting = [], [Config]
    while waiting:
        below = [
            subclass
            for subclass in waiting.pop().__subclasses__()
            if subclass.__module__.startswith("alignment_core.recipes")
        ]
        configs += below
        waiting += below
    return configs


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.__name__)
def test_every_field_has_a_description_and_every_class_a_docstring(config):
    assert config.__doc__
    assert [name for name, field in config.model_fields.items() if not field.description] == []


def test_a_recipe_cannot_be_changed(load):
    recipe = load(SFT)
    for target, name in ((recipe, "seed"), (recipe.sft.training, "batch_size"), (recipe.model, "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, name, 3)
    assert isinstance(recipe.sft.data.sources, tuple)
