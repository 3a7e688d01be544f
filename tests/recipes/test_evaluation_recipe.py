"""Fields of a recipe that only evaluates, and valid numbers k for `pass@k`."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.recipes import parse_recipe
from tests.recipes.contents import NIGHT, SFT, Load, refusal

EVALUATION: dict[str, Any] = {"prompts": "prompts.jsonl", "verifier": "checks.py:right"}
ALONE: dict[str, Any] = {"method": "evaluate", "name": "e", "model": "some/model", "evaluation": EVALUATION}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"promotion": {}}, "`promotion` has no effect, as no policy is made"),
        ({"models": {"model": "a/b"}}, "`models.model`: tables call something else so"),
        ({"models": {"a/b": "a/b"}}, "string should match pattern"),
        ({"evaluation": None}, "evaluation"),
        ({"evaluation": {**EVALUATION, "pass_at": [8]}}, "`pass_at` needs 8 completions of a prompt: raise"),
        ({"evaluation": {**EVALUATION, "pass_at": [0]}}, "greater than or equal to 1"),
        ({"evaluation": {"prompts": "prompts.jsonl", "pass_at": [1]}}, "`pass_at` needs a `verifier`"),
        ({"evaluation": {**EVALUATION, "prompts": {"path": "p.jsonl", "test_rows": 9}}}, "remove `test_rows`"),
        (
            {"evaluation": {**EVALUATION, "prompts": ["p.jsonl", {"path": "q.jsonl", "held_out": True}]}},
            "`prompts`: all of these rows are measured",
        ),
    ],
)
def test_inconsistent_fields_are_refused(more: dict[str, Any], says: str, load: Load) -> None:
    assert says in refusal(load, ALONE | more)


def test_recipes_of_earlier_runs_that_hold_evaluation_prompts_out_are_read() -> None:
    assert parse_recipe(ALONE | {"evaluation": {**EVALUATION, "prompts": {"path": "p.jsonl", "test_rows": 9}}})


def test_a_gate_may_ask_for_a_pass_rate_that_is_measured(load: Load) -> None:
    gate = {"promotion": {"gates": [{"metric": "pass@2.low", "min": 0.5}]}}
    measured = {**EVALUATION, "pass_at": [1, 2], "generation": {"num_generations": 2}}
    assert load(SFT | gate | {"evaluation": measured})
    assert "nothing measures 'pass@2.low': add `evaluation.pass_at`" in refusal(
        load, SFT | gate | {"evaluation": {**measured, "pass_at": [1]}}
    )


@pytest.mark.parametrize("generation", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
@pytest.mark.parametrize("recipe", [SFT, NIGHT], ids=["sft", "nightly"])
@pytest.mark.parametrize("metric", ["kl.high", "baseline_perplexity"])
def test_a_gate_on_estimates_from_samples_is_refused_where_sampling_excludes_tokens(
    metric: str, generation: dict[str, Any], recipe: dict[str, Any], load: Load
) -> None:
    recipe = recipe | {"promotion": {"gates": [{"metric": metric, "max": 1}]}}
    assert load(recipe | {"evaluation": EVALUATION | {"generation": {"temperature": 0.7}}})
    message = refusal(load, recipe | {"evaluation": EVALUATION | {"generation": generation}})
    name = metric.partition(".")[0]
    assert f"`promotion.gates.0`: `{name}` is estimated from samples of the unmodified policy" in message


@pytest.mark.parametrize(("temperature", "is_taken"), [(0, True), (0.005, False), (0.01, True), (1.5, True)])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature: float, is_taken: bool, load: Load) -> None:
    recipe = SFT | {"evaluation": EVALUATION | {"generation": {"temperature": temperature}}}
    if is_taken:
        assert load(recipe)
    else:
        assert "vLLM raises lower temperatures to 0.01" in refusal(load, recipe)


def test_a_sweep_is_not_ranked_by_kl_where_sampling_excludes_tokens(load: Load) -> None:
    sweep = {"method": "sweep", "base": SFT, "sweep": {"seed": [0, 1]}, "rank_by": "kl"}
    message = refusal(load, sweep | {"evaluation": EVALUATION | {"generation": {"top_p": 0.9}}})
    assert "`rank_by`: `kl` is estimated from samples of the unmodified policy" in message


def test_the_key_of_an_evaluation_without_pass_rates_is_that_of_before(load: Load) -> None:
    evaluation = load(ALONE).evaluation
    assert evaluation is not None
    assert "pass_at" not in evaluation.model_dump(mode="json")


def test_gates_on_the_kl_to_the_model_are_for_nights(load: Load) -> None:
    judged = {"evaluation": EVALUATION, "promotion": {"gates": [{"metric": "kl_to_model", "max": 50}]}}
    assert load(NIGHT | judged)
    assert "`kl_to_model` is measured in nights: use `kl` here" in refusal(load, SFT | judged)
    greedy = {**EVALUATION, "generation": {"temperature": 0}}
    assert "`temperature` above 0" in refusal(load, NIGHT | judged | {"evaluation": greedy})


def test_a_gate_on_the_mean_of_a_reward_needs_several_rewards(load: Load) -> None:
    judged = {"promotion": {"gates": [{"metric": "reward_1", "min_gain": 0}]}}
    rewards = [{"reward_model": "a/judge"}, {"reward_model": "b/judge", "weight": 0}]
    assert load(SFT | judged | {"evaluation": {**EVALUATION, "rewards": rewards}})
    says = refusal(load, SFT | judged | {"evaluation": {**EVALUATION, "rewards": rewards[:1]}})
    assert "nothing measures 'reward_1': add further `evaluation.rewards`, of which the first is 0" in says
