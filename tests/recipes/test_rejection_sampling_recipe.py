"""Recipes of rejection sampling: inconsistent fields, and the metric of a gain."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from alignment_core.recipes import parse_recipe
from alignment_core.recipes.methods import decides
from tests.recipes.contents import refusal

PROMPTS = {"prompts": "p.jsonl"}
REWARDS = {"rewards": [{"verifier": "math"}]}
BARE: dict[str, Any] = {"method": "rejection-sampling", "name": "demo", "model": "m"}
MINIMAL = {**BARE, "rejection_sampling": {**PROMPTS, **REWARDS}}
EVALUATION = {"prompts": "held-out.jsonl", "verifier": "math"}


def parsed(section: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Any:
    return parse_recipe(
        {**BARE, "evaluation": EVALUATION, "rejection_sampling": {**PROMPTS, **REWARDS, **section}, **fields}
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("selection={strategy: top_k}", "rejection_sampling.selection: `strategy: top_k` needs `k`"),
        ("selection={strategy: threshold}", "`strategy: threshold` needs exactly one of `threshold` (a score) and"),
        ("selection={strategy: threshold, threshold: 1, quantile: 0.5}", "needs exactly one of `threshold`"),
        ("selection={threshold: 1}", "`threshold` has no effect with `strategy: best_of_n`: use `min_score`"),
        ("selection={k: 2}", "`k` has no effect with `strategy: best_of_n`"),
        ("selection={strategy: top_k, k: 4}", "keeps 4 of 4 completions per prompt, so it rejects none: raise"),
        ("generation.num_generations=1", "keeps 1 of 1 completions per prompt, so it rejects none"),
        ("selection={score: verifier}", "`rejection_sampling.rewards` and `rejection_sampling.selection.score: veri"),
        ("rewards=[]", "`reward_model` is needed, because `rejection_sampling.selection.score` is `reward`"),
        ("rewards=[{reward_model: ours}]", "`rejection_sampling.rewards` refers to the reward model `ours`: add a"),
        ("stop={metric: accuracy}", "`rejection_sampling.stop.metric`: nothing measures 'accuracy': add `evaluation"),
        ("stop={min_gain: -1}", "rejection_sampling.stop.min_gain"),
    ],
)
def test_inconsistent_fields_are_refused_in_a_sentence(load, override, sentence):
    assert sentence in refusal(load, MINIMAL, f"rejection_sampling.{override}")


def test_normalised_rewards_of_two_rounds_are_not_compared(load):
    section = {**PROMPTS, "rewards": [{"verifier": "math", "normalise": "group"}], "stop": {}}
    message = refusal(load, {**BARE, "rejection_sampling": section})
    assert (
        "`rejection_sampling.stop` cannot compare the normalised rewards of two rounds: add an `evaluation`" in message
    )


def test_the_gain_is_of_the_selections_score_if_the_evaluation_measures_that_score():
    assert parsed().gain_metric == "accuracy", "the evaluation has no rewards"
    assert parsed(evaluation={**EVALUATION, **REWARDS}).gain_metric == "reward"
    by_verifier = {"rewards": (), "selection": {"score": "verifier"}}
    assert parsed(by_verifier, evaluation={**EVALUATION, **REWARDS}).gain_metric == "accuracy"
    selection = {"stop": {"metric": "accuracy"}}
    assert parsed(selection, evaluation={**EVALUATION, **REWARDS}).gain_metric == "accuracy"
    assert parsed(evaluation=None).gain_metric is None


def test_changes_are_shown_with_fields_of_the_recipe():
    assert decides("round-2/best", "selection.min_score") == "rejection_sampling.selection.min_score"
    assert decides("round-2/sample", "prompts") == "rejection_sampling.prompts_per_round"
    assert decides("round-2/gain", "min_gain") == "rejection_sampling.stop.min_gain"
    assert decides("round-2/generate", "generation.top_p") == "iterative_dpo.generation.top_p"
