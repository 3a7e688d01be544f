"""The JSON schema of a recipe, which the run form and Prefect's server use, accepts all that a recipe's file may contain."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from pydantic import TypeAdapter

from alignment_core.methods.sweep import SweepRecipe
from alignment_core.recipes import load_recipe
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import method
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.recipes.sections.rewards import REWARDS, Reward
from alignment_core.recipes.urls import Urls

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "deployments" / "recipes").rglob("*.yaml"))


@cache
def validator(config: type[Config]) -> Any:
    return jsonschema.Draft202012Validator(config.model_json_schema())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_the_schema_as_written_and_as_stored(path: Any) -> None:
    written, kept = yaml.safe_load(path.read_text()), load_recipe(path).model_dump(mode="json")
    schema = validator(method(written["method"]).recipe)
    assert [error.message for content in (written, kept) for error in schema.iter_errors(content)] == []


SWEPT = {"method": "sft", "name": "s", "model": "m", "sft": {"data": {"task": "first", "rows": 8, "test_rows": 2}}}
SHORT: list[tuple[type[Config], Any]] = [
    (ModelConfig, "Qwen/Qwen2.5-0.5B-Instruct"),
    (DataSource, "rows.jsonl"),
    (DataConfig, "rows.jsonl"),
    (DataConfig, ["rows.jsonl", {"task": "reverse", "rows": 5}]),
    (DataConfig, {"path": "rows.jsonl", "rows": 5, "max_length": 64}),
    (DataConfig, {"sources": ["rows.jsonl"]}),
    (REWARDS.load("endpoint").config, {"urls": "http://host/score"}),
    (REWARDS.load("endpoint").config, {"urls": ["http://host/score"]}),
    (REWARDS.load("judge").config, {"judge": "http://host/v1", "judge_model": "m"}),
    (SweepRecipe, {"sweep": {"seed": [1, 2]}, "base": SWEPT}),
    (PairwiseJudgeConfig, {"judge": "http://host/v1", "judge_model": "m"}),
]


@pytest.mark.parametrize(("config", "content"), SHORT, ids=str)
def test_a_shorthand_is_in_the_schema(config: type[Config], content: Any) -> None:
    config.model_validate(content)
    assert validator(config).is_valid(content)


@pytest.mark.parametrize(
    ("config", "content"), [(DataConfig, {"path": "rows.jsonl", "max_lenght": 64}), (ModelConfig, 3), (DataSource, [])]
)
def test_the_schema_refuses_invalid_content(config: type[Config], content: Any) -> None:
    assert not validator(config).is_valid(content)


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        ({"urls": "http://host/score", "batch_size": 2}, True),
        ({"reward_model": "policy/judge", "weight": 2}, True),
        ({"environment": True}, True),
        ({"verifier": "math", "batch_size": 2}, False),
        ({"verifier": "math", "function": "f.py:f"}, False),
        ({"weight": 2}, False),
    ],
)
def test_a_reward_in_a_list_is_of_one_kind(content: dict[str, Any], taken: bool) -> None:
    adapter: TypeAdapter[tuple[Any, ...]] = TypeAdapter(tuple[Reward, ...])
    assert jsonschema.Draft202012Validator(adapter.json_schema()).is_valid([content]) == taken
    if taken:
        kept = adapter.dump_python(adapter.validate_python([content]), mode="json")
        assert adapter.dump_python(adapter.validate_python(kept), mode="json") == kept


NOT_OF_RECIPES = (
    "_fill_defaults",
    "_truth_is_no_number",
    "_numbers_with_exponents",
    "_rows_arrive_in_paths",
    "_without_trust",
    "_are_words",
    "_of_earlier_versions",
    "_fill_precision",
)
"""Validators that take no other form of a recipe's section, or that read records."""


def test_no_validator_accepts_input_that_the_schema_refuses() -> None:
    """A new validator that changes its input has to be added to the schema, and here to SHORT."""
    changing = {
        of.__name__
        for of in _configs(Config)
        for kind in (of.__pydantic_decorators__.model_validators, of.__pydantic_decorators__.field_validators)
        for name, validator in kind.items()
        if validator.info.mode in ("before", "wrap", "plain") and name not in NOT_OF_RECIPES
    }
    changing |= {
        of.__name__
        for of in _configs(Config)
        for field in of.model_fields.values()
        if callable(field.json_schema_extra) or Urls in get_args(field.annotation)  # which has one
    }
    assert changing == {config.__name__ for config, _ in SHORT}


def _configs(config: type[Config]) -> set[type[Config]]:
    return {config}.union(*(_configs(subclass) for subclass in config.__subclasses__()))
