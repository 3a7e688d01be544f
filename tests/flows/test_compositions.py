"""What a recipe is composed of: which stages, and what each is given. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.artifacts import Store, open_store
from alignment_core.recipes import parse_recipe
from flows.planning import COMPOSITIONS
from tasks.graph import CURRENT

MODEL = {"scratch": {"hidden_size": 16, "num_attention_heads": 2}}
TASK = {"task": "first", "rows": 20}
SFT = {"data": TASK}
PAIRS = {"data": TASK}
EVALUATION = {"prompts": {**TASK, "split": "test"}, "verifier": "task"}
ROUNDS = {"rounds": 1, "prompts": TASK, "prompts_per_round": 8}
GATES = {"gates": [{"metric": "accuracy", "min_gain": 0}]}
RL = {
    "prompts": TASK,
    "prompts_per_step": 4,
    "steps": 1,
    "rewards": [{"verifier": "task"}],
    "advantage": {"estimator": "group"},
    "best": {"prompts": {**TASK, "split": "test"}},
}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"sft": SFT},
    "dpo": {"sft": SFT, "dpo": PAIRS},
    "iterative-dpo": {"sft": SFT, "reward_model": PAIRS, "iterative_dpo": ROUNDS},
    "rl": {"sft": SFT, "rl": RL},
}


class Composed:
    """A run that notes what is submitted to it, because a real one would train."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.inputs: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, Any] = {}

    def submit(self, _stage: str, label: str, config: Any, inputs: dict[str, Any], stream: str) -> Any:
        self.inputs[label] = {role: one for role, one in inputs.items() if one is not None}
        self.configs[label] = config
        return SimpleNamespace(label=label)

    def roles(self, label: str) -> dict[str, str]:
        return {role: getattr(one, "label", str(one)) for role, one in self.inputs[label].items()}


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    run = Composed(open_store(tmp_path / "store"))
    token = CURRENT.set(run)
    yield run
    CURRENT.reset(token)


def compose(run: Composed, method: str, **fields: Any) -> Any:
    content = {"name": "one", "model": MODEL, "evaluation": EVALUATION, **RECIPES[method], **fields}
    recipe = parse_recipe({"method": method, **content})
    return COMPOSITIONS[method](recipe)


@pytest.mark.parametrize(
    ("method", "trained"),
    [
        ("sft", {"sft/data"}),
        ("dpo", {"sft/data", "dpo/data"}),
        ("iterative-dpo", {"sft/data", "reward-model/data", "rounds/prompts"}),
        ("rl", {"sft/data", "rl/prompts"}),
    ],
)
def test_held_out_prompts_are_compared_with_everything_that_is_trained_on(composed, method, trained):
    compose(composed, method)
    assert composed.roles("evaluation/overlap") == {"held_out": "evaluation/prompts", **{one: one for one in trained}}
    assert composed.roles("report")["overlap"] == "evaluation/overlap"
    if method == "rl":
        assert composed.roles("rl/held-out/overlap") == {"held_out": "rl/held-out", **{one: one for one in trained}}


def test_an_overlap_is_refused_only_where_a_gate_depends_on_it(composed):
    compose(composed, "sft")
    assert composed.configs["evaluation/overlap"].max_overlap is None
    compose(composed, "sft", promotion=GATES)
    assert composed.configs["evaluation/overlap"].max_overlap == 0
    compose(composed, "sft", promotion=GATES, evaluation={**EVALUATION, "max_overlap": 0.5})
    assert composed.configs["evaluation/overlap"].max_overlap == 0.5
