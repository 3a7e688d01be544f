"""Recipes of process reward models: inconsistent fields are refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.errors import UserError
from alignment_core.recipes.load import parse_recipe
from alignment_core.recipes.sections.process_reward_model import StepsConfig

DATA = {"data": {"task": "highest"}}
EVALUATION = {
    "prompts": {"task": "highest", "split": "test"},
    "generation": {"num_generations": 4},
    "verifier": "task",
    "rewards": [{"process_reward_model": "ours"}],
}


def recipe(**fields: Any) -> Any:
    content = {"name": "prm", "model": "some/model", "process_reward_model": DATA, **fields}
    return parse_recipe({"method": "process-reward-model", **content}, refuse_unused=True)


def test_a_recipe_without_an_evaluation_only_trains() -> None:
    assert recipe().evaluation is None
    assert recipe(evaluation=EVALUATION).evaluation is not None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reward_model": DATA}, "`reward_model` is there to be compared: add `evaluation`"),
        ({"reward_model": DATA, "evaluation": EVALUATION}, "nothing uses `reward_model`"),
        ({"evaluation": {**EVALUATION, "rewards": []}}, "`evaluation.rewards` lists what chooses"),
        ({"evaluation": {**EVALUATION, "verifier": None}}, "`evaluation.verifier` says which answers are right"),
        ({"evaluation": {**EVALUATION, "generation": {"num_generations": 1}}}, "needs at least 2 answers"),
        ({"promotion": {"tag": "best"}}, "trains no policy that could be promoted"),
        ({"process_reward_model": {**DATA, "steps": {"verdict_tokens": ["+", "+"]}}}, "are the same token"),
        ({"process_reward_model": {**DATA, "steps": {"placeholder_prefix": " "}}}, "there is none: add `placeholder`"),
        ({"evaluation": {**EVALUATION, "rewards": [{"reward_model": "ours"}]}}, "add a section `reward_model`"),
        (
            {"process_reward_model": {**DATA, "training": {"bf16": True, "keep_master_weights": False}}},
            "`keep_master_weights` has no effect because nothing trains a reward model further",
        ),
    ],
)
def test_inconsistent_fields_are_refused_with_the_fix(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        recipe(**fields)


def test_layouts_of_earlier_versions_keep_their_keys() -> None:
    assert StepsConfig().model_dump().keys() == {"separator", "placeholder", "verdict_tokens"}


def test_other_recipes_name_a_process_reward_model() -> None:
    content = {"method": "sft", "name": "a", "model": "some/model", "sft": DATA}
    with pytest.raises(
        UserError, match="refers to the process reward model `ours`: `method: sft` has none, so name a model"
    ):
        parse_recipe({**content, "evaluation": EVALUATION})
    named = {**EVALUATION, "rewards": [{"process_reward_model": "prm/production", "aggregate": "product"}]}
    assert parse_recipe({**content, "evaluation": named}).evaluation.rewards[0].aggregate == "product"
