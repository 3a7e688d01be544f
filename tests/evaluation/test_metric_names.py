"""Metrics are shown by one list: in the field's words, with units, in groups and in order.

The labels are those of TRL's logged metrics (docs/source/grpo_trainer.md, dpo_trainer.md) in plain words.
"""

from __future__ import annotations

import pkgutil

import pytest

import alignment_core.stages
from alignment_core.evaluation.metric_names import arrow, in_order, is_curve, metric_of, single_numbers, titles
from alignment_core.execution.base import load_stage
from alignment_core.reporting.results import result_rows

RL = (
    *(
        "staleness",
        "surprising",
        "learning_rate",
        "ratio",
        "grad_norm",
        "reward_deviation",
        "rewards/format/mean",
        "reward",
    ),
    *("clipped", "steps", "kl", "loss", "completion_length", "rewards/format/std", "entropy_estimate", "extra_calls"),
    *("rewards/math/mean", "parameters", "reward/missing_share"),
)


def test_metrics_of_reinforcement_learning_are_in_order_and_have_the_words_of_the_field() -> None:
    assert [metric_of(name).title for name in in_order(RL)] == [
        "reward",
        "reward: format",
        "reward std: format",
        "reward: math",
        "reward std",
        "completions without a reward (share)",
        "calls (logged by a reward)",
        "loss",
        "KL (nats)",
        "entropy estimate (nats per token)",
        "clip fraction (share of tokens)",
        "importance ratio",
        "staleness (steps)",
        "gradient norm",
        "learning rate",
        "completion length (tokens)",
        "steps",
        "parameters of the model",
        "surprising",
    ]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("test_loss", "test loss"),
        ("critic_loss", "critic loss"),
        ("critic_grad_norm", "critic gradient norm"),
        ("pretraining_loss", "pretraining loss"),
        ("reward_10", "reward 10"),
        ("changed_weights/best", "changed weights: best (share)"),
        ("pass@4", "pass@4"),
        ("lm_eval/wikitext/word_perplexity", "wikitext/word_perplexity"),
        ("kl.low", "KL (nats)"),
        ("of_a_plugin", "of a plugin"),
    ],
)
def test_names_that_hold_a_part_of_their_own_or_another_name(name: str, title: str) -> None:
    assert metric_of(name).title == title


def test_numbered_rewards_are_in_the_order_of_their_numbers() -> None:
    assert in_order(["reward_10", "reward_9", "pass@16", "pass@4"]) == ["pass@4", "pass@16", "reward_9", "reward_10"]


def test_curves_of_reinforcement_learning_and_of_fine_tuning() -> None:
    """The main metrics of GRPO and SFT runs: each reward, its deviation, KL, entropy, clip fraction, length, missing
    rewards, and the losses of training and of held-out rows."""
    wanted = (
        "reward reward_deviation rewards/f/mean rewards/f/std kl entropy entropy_estimate clipped completion_length"
    )
    assert all(map(is_curve, [*wanted.split(), "reward/missing_share", "loss", "test_loss", "accuracy", "margin"]))
    assert not any(map(is_curve, ["grad_norm", "tokens_per_second", "steps", "a_metric_of_a_plugin"]))


def test_arrows_show_which_direction_is_better() -> None:
    arrows = {name: arrow(name, {}) for name in ("loss", "accuracy", "reward", "kl", "steps", "entropy", "test_loss")}
    assert arrows == {
        "loss": "↓",
        "accuracy": "↑",
        "reward": "↑",
        "kl": "↓",
        "steps": "",
        "entropy": "",
        "test_loss": "↓",
    }
    assert arrow("rewards/f/mean", {}) == "↑"
    assert [arrow(name, {}) for name in ("rewards/f/std", "changed_weights", "changed_weights/best")] == ["", "", ""]
    assert arrow("lm_eval/t/toxicity", {"lm_eval/t/toxicity.higher_is_better": 0.0}) == "↓"


def test_metrics_without_a_better_direction_have_none_on_held_out_rows_or_of_the_critic() -> None:
    """KTO measures its baseline and the share of desirable rows on held-out rows, too, and PPO's critic has a gradient; for
    metrics logged by a user's function no direction is known."""
    neutral = "test_baseline test_desirable test_label critic_grad_norm critic_learning_rate extra_length extra_score"
    assert {name: arrow(name, {}) for name in neutral.split()} == dict.fromkeys(neutral.split(), "")
    assert [arrow(name, {}) for name in ("test_accuracy", "critic_loss", "critic_error")] == ["↑", "↓", "↓"]


def test_a_table_of_results_is_grouped_and_has_starts_and_intervals() -> None:
    metrics = {
        "steps": 20,
        "loss": 0.25,
        "loss.first": 1.0,
        "accuracy": 0.5,
        "accuracy.low": 0.4,
        "accuracy.high": 0.6,
        "accuracy.n": 64,
        "confidence": 0.95,
        "result": "sft",
        "policies": {},
        "warnings": ["odd"],
    }
    assert result_rows(metrics) == {
        "Evaluation": [("accuracy ↑", "", "0.500 [0.400, 0.600]")],
        "Training": [("loss ↓", "1.000", "0.250")],
        "Work": [("steps", "", "20")],
    }
    assert single_numbers({"policies": {}}) == []


def test_key_metrics_of_stages_have_the_labels_of_the_list() -> None:
    """Stages that count units, such as rows, have their own words for them."""
    own = {"attributes", "base_model", "best_of_n", "dataset", "gain", "generate", "merge", "merge_adapter", "overlap"}
    own |= {"reference_logps", "select_best", "select_pairs", "teacher_logps", "variants"}
    for module in pkgutil.iter_modules(alignment_core.stages.__path__):
        stage = load_stage(module.name) if module.name not in own else None
        if stage is not None:
            assert dict(stage.shows) == titles(*stage.shows), module.name
