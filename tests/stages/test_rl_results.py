"""The policy that ``rl.result`` names: a choice among the stage's outputs, which are the same whatever is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.composition.plan import PlannedStage
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import key_of
from alignment_core.recipes import parse_recipe
from alignment_core.stages.rl import RlStageConfig
from tests.stages.calls import reference

TASK = {"task": "reverse", "rows": 8}
RL: dict[str, Any] = {"prompts": TASK, "rewards": [{"verifier": "task"}], "ema": {}, "best": {"prompts": TASK}}


def planned(store: Store, result: dict[str, str]) -> list[PlannedStage]:
    content = {
        "method": "rl",
        "name": "a",
        "model": {"scratch": {}},
        "rl": {**RL, **result},
        "evaluation": {"prompts": {**TASK, "split": "test"}, "verifier": "task"},
    }
    return plan(parse_recipe(content), store).stages


@pytest.mark.parametrize(
    ("result", "output"),
    [({}, "policy"), ({"result": "last"}, "policy"), ({"result": "average"}, "average"), ({"result": "best"}, "best")],
)
def test_all_that_follows_gets_the_output_that_is_the_result(result: dict[str, str], output: str, store: Store) -> None:
    stages = planned(store, result)
    used = {
        value.name
        for stage in stages
        for value in stage.inputs.values()
        if isinstance(value, PlannedStage) and value.stage == "rl"
    }
    assert used == {output}


def test_the_choice_is_not_in_the_key_because_it_changes_no_output() -> None:
    inputs = {
        "policy": reference("model", "1"),
        "prompts": reference("dataset", "2"),
        "held_out": reference("dataset", "3"),
    }
    keys = set()
    for result in ("last", "average", "best"):
        config = RlStageConfig.model_validate({"section": {**RL, "result": result}}).model_dump(mode="json")
        keys.add(key_of(StageCall(stage="rl", label="rl", config=config, inputs=inputs)).value)
    assert len(keys) == 1
    without = RlStageConfig.model_validate({"section": {**RL, "ema": {"decay": 0.5}}}).model_dump(mode="json")
    assert key_of(StageCall(stage="rl", label="rl", config=without, inputs=inputs)).value not in keys
