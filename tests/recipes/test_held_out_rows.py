"""Settings of training that need held-out rows, with and without such rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.contents import JUDGE, RL, ROUNDS, SFT, Load, refusal

EVALUATION: dict[str, Any] = {"eval_steps": 10, "metric_for_best_model": "loss"}
HELD_OUT: dict[str, Any] = {"path": "rows.jsonl", "test_rows": 10}


def test_a_section_with_held_out_rows_may_choose_the_best(load: Load) -> None:
    assert load(SFT | {"sft": {"data": HELD_OUT, "training": {**EVALUATION, "early_stopping_patience": 3}}})
    assert load(JUDGE | {"reward_model": {"data": HELD_OUT, "training": EVALUATION}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SFT | {"sft": {"data": "rows.jsonl", "training": EVALUATION}}, "set `data.test_rows`"),
        (JUDGE | {"reward_model": {"data": "rows.jsonl", "training": EVALUATION}}, "set `data.test_rows`"),
        (
            SFT | {"sft": {"data": HELD_OUT, "training": {"metric_for_best_model": "loss"}}},
            "`metric_for_best_model` needs `eval_steps`",
        ),
        (
            SFT | {"sft": {"data": HELD_OUT, "training": {"eval_steps": 1, "early_stopping_patience": 2}}},
            "`early_stopping_patience` needs `metric_for_best_model`",
        ),
        (
            ROUNDS | {"iterative_dpo": {"prompts": "prompts.jsonl", "training": EVALUATION}},
            "`eval_steps` has no effect in `iterative_dpo.training`: the pairs of a round hold out no rows",
        ),
        (
            RL | {"rl": {**RL["rl"], "training": EVALUATION}},
            "`eval_steps` has no effect in `rl.training`: use `rl.best`",
        ),
        (
            ROUNDS | {"iterative_dpo": {"prompts": "prompts.jsonl", "training": {"eval_on_start": False}}},
            "`eval_on_start` has no effect in `iterative_dpo.training`: the pairs of a round hold out no rows",
        ),
        (
            RL | {"rl": {**RL["rl"], "steps": 5, "training": {"save_steps": 5}}},
            "`save_steps` has no effect with `rl.steps` 5, because the last model is an output anyway: set it below 5",
        ),
    ],
)
def test_evaluation_fields_are_refused_without_held_out_rows(content: dict[str, Any], says: str, load: Load) -> None:
    assert says in refusal(load, content)


def test_keys_without_evaluation_fields_are_unchanged(load: Load) -> None:
    training = load(SFT).model_dump(mode="json")["sft"]["training"]
    assert not {*EVALUATION, "early_stopping_patience", "eval_on_start"} & training.keys()
