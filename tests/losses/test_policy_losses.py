"""Policy, value and KL losses against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from alignment_core.losses.kl import adapted_coefficient, kl_estimate, kl_with_unbiased_gradient
from alignment_core.losses.policy import (
    aggregation_normaliser,
    aggregation_weights,
    cispo_loss,
    clipped_ratio_loss,
    clipped_tokens,
    policy_objective,
    sapo_loss,
    sequence_log_ratio,
    top_entropy,
    value_loss,
)
from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*ratios: float) -> torch.Tensor:
    return of(*ratios).log()


def gradient(function: object, at: torch.Tensor) -> list[float]:
    at = at.clone().requires_grad_()
    function(at).sum().backward()  # type: ignore[operator]
    assert at.grad is not None
    return at.grad.tolist()


def test_the_clip_counts_only_against_the_move_that_the_advantage_asks_for() -> None:
    # ε_low 0.2, ε_high 0.3. A = 2: r 1.5 counts as 1.3, r 0.5 as itself; A = -2: r 1.5 as itself, r 0.5 as 0.8
    losses = clipped_ratio_loss(logs(1.5, 0.5, 1.5, 0.5), of(2.0, 2.0, -2.0, -2.0), 0.8, 1.3)
    assert losses.tolist() == pytest.approx([-2.6, -1.0, 3.0, 1.6])


def test_a_clipped_token_has_no_gradient_and_another_that_of_ratio_times_advantage() -> None:
    # d(-r A)/d log r = -r A: at r = 1.1, A = 2 that is -2.2; r = 1.5 is clipped
    slope = gradient(lambda x: clipped_ratio_loss(x, of(2.0, 2.0), 0.8, 1.3), logs(1.1, 1.5))
    assert slope == pytest.approx([-2.2, 0.0])


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # A = -1, r = 5: without it L = 5, with c = 3 L = 3; positive advantages are untouched
    assert clipped_ratio_loss(logs(5.0, 5.0), of(-1.0, 1.0), 0.8, 1.2, 3.0).tolist() == pytest.approx([3.0, -1.2])


def test_a_sequence_ratio_is_the_geometric_mean_with_the_gradient_of_each_token() -> None:
    # sequence 0: ratios 2 and 8, geometric mean 4; sequence 1: one token of ratio 3
    sequence_K = torch.tensor([0, 0, 1])
    ratio = sequence_log_ratio(logs(2.0, 8.0, 3.0), sequence_K, 2).exp()
    assert ratio.tolist() == pytest.approx([4.0, 4.0, 3.0])
    slope = gradient(lambda x: sequence_log_ratio(x, sequence_K, 2).exp(), logs(2.0, 8.0, 3.0))
    assert slope == pytest.approx([4.0, 4.0, 3.0])


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    assert torch.isfinite(clipped_ratio_loss(of(1000.0, -1000.0), of(-1.0, 1.0), 0.8, 1.2)).all()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    # bounds 0.8 and 1.3; sequence 0: ratios 2 and 0.5, geometric mean 1; sequence 1: ratios 1.2 and 1.6, mean 1.386;
    # by token 2, 0.5 and 1.6 are outside, by sequence both tokens of the second
    [("clip", 3), ("cispo", 3), ("gspo", 2)],
)
def test_the_clip_fraction_counts_the_ratio_that_the_loss_clips(loss_type: str, expected: int) -> None:
    high = 1.3 if loss_type == "cispo" else 0.3
    config = PolicyLossConfig.model_validate({"loss_type": loss_type, "epsilon": 0.2, "epsilon_high": high})
    count = clipped_tokens(config, logs(2.0, 0.5, 1.2, 1.6), torch.tensor([0, 0, 1, 1]), 2)
    assert int(count) == expected


@pytest.mark.parametrize(("loss_type", "expected"), [("gspo", 2.0), ("sapo", None)])
def test_a_loss_without_bounds_has_no_clip_fraction(loss_type: str, expected: float | None) -> None:
    content = {"prompts": "prompts.jsonl", "rewards": [{"verifier": "math"}], "loss": {"loss_type": loss_type}}
    section = RlConfig.model_validate(content)
    old_K = of(0.1, 0.1)
    numbers = {"advantages": of(1.0, 1.0), "rollout_logps": old_K.log(), "old_logps": old_K.log()}
    _, sums = policy_objective(section, 0.0, of(0.2, 0.2).log(), numbers, torch.tensor([0, 1]), 2)
    assert sums["ratio"] == pytest.approx(4.0)
    assert sums.get("clipped") == expected


def test_tokens_of_high_entropy_are_trained_and_the_kl_keeps_all() -> None:
    # the highest 40 % of five are two; the threshold is between 3 and 2
    selected = top_entropy(np.array([0.5, 3.0, 1.0, 2.0, 4.0], np.float32), 0.4)
    assert selected.tolist() == [0, 1, 0, 0, 1]
    assert top_entropy(np.array([1.0, 1.0], np.float32), 0.1).tolist() == [1, 1], "equal ones are together"
    content = {
        "prompts": "prompts.jsonl",
        "rewards": [{"verifier": "math"}],
        "kl": {"coefficient": 0.1, "estimator": "k1"},
    }
    logps = of(0.5, 0.5).log()
    numbers = {
        "advantages": of(2.0, 2.0),
        "rollout_logps": logps,
        "reference_logps": logps - 1,
        "top_entropy": of(1.0, 0.0),
    }
    # at ratio 1 the policy loss is -A: -2 of the first token and 0 of the second; k1 is 1 of both
    loss, _ = policy_objective(RlConfig.model_validate(content), 0.1, logps, numbers, torch.tensor([0, 0]), 1)
    assert loss.item() == pytest.approx(-2 + 2 * 0.1)


@pytest.mark.parametrize(("place", "expected"), [("loss", math.log(0.4 / 0.5) + math.log(0.6 / 0.5)), ("reward", None)])
def test_the_kl_in_the_reward_is_not_measured_again_after_updates(place: str, expected: float | None) -> None:
    """A policy that sampled two tokens with 0.5 each is its own reference, and an update made 0.4 and 0.6 of them. Over the
    samples of the policy before the update, k1 is then KL(old, reference) - KL(old, new) = 0 - 0.0204 a token: negative, and
    an adaptive coefficient would fall by it."""
    content = {
        "prompts": "prompts.jsonl",
        "rewards": [{"verifier": "math"}],
        "kl": {"coefficient": 0.1, "estimator": "k1", "place": place},
    }
    old = of(0.5, 0.5).log()
    numbers = {"advantages": of(1.0, 1.0), "rollout_logps": old, "old_logps": old, "reference_logps": old}
    section = RlConfig.model_validate(content)
    _, sums = policy_objective(section, 0.1, of(0.4, 0.6).log(), numbers, torch.tensor([0, 0]), 1)
    assert sums.get("kl") == (expected if expected is None else pytest.approx(expected))


def test_cispo_weighs_the_log_probability_by_a_ratio_without_gradient() -> None:
    # r = 1.5 counts as 1.3: L = -1.3 · 2 · log 0.5 = 1.802183, gradient -2.6; r = 0.5 counts as 0.8
    logps = of(0.5, 0.5).log()
    losses = cispo_loss(logs(1.5, 0.5), logps, of(2.0, 2.0), 0.8, 1.3)
    assert losses.tolist() == pytest.approx([-2.6 * math.log(0.5), -1.6 * math.log(0.5)])
    assert gradient(lambda x: cispo_loss(logs(1.5, 0.5), x, of(2.0, 2.0), 0.8, 1.3), logps) == pytest.approx(
        [-2.6, -1.6]
    )


def test_sapo_starts_with_the_gradient_of_the_ratio_and_fades() -> None:
    # at r = 1: -(4/τ) σ(0) A = -2 A / τ, and the slope is -A for any τ
    assert sapo_loss(logs(1.0), of(3.0), 2.0, 1.0).tolist() == pytest.approx([-3.0])
    assert gradient(lambda x: sapo_loss(x, of(3.0, -3.0), 2.0, 1.0), logs(1.0, 1.0)) == pytest.approx([-3.0, 3.0])
    # at r = 2, τ = 1: the slope in r is -4 σ(1) (1 - σ(1)) A = -0.786448 A; times r for that in log r
    assert gradient(lambda x: sapo_loss(x, of(1.0), 1.0, 1.0), logs(2.0)) == pytest.approx([-1.5728954])


def test_the_value_loss_takes_the_worse_of_the_free_and_the_clipped_value() -> None:
    # V 2, V_old 1, R 3, ε 0.5: free (2-3)² = 1, clipped (1.5-3)² = 2.25; half of the larger
    assert value_loss(of(2.0), of(1.0), of(3.0), 0.5).tolist() == pytest.approx([1.125])
    assert value_loss(of(2.0), of(1.0), of(3.0), None).tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # sequence 0 has losses 1, 2, 3 and sequence 1 has 6; longest allowed 5
    [("token-mean", 12 / 4), ("sequence-mean-token-mean", (2 + 6) / 2), ("fixed-length", 12 / 10)],
)
def test_aggregation_weights_by_hand(aggregation: str, expected: float) -> None:
    sequence_K = torch.tensor([0, 0, 0, 1])
    weights = aggregation_weights(sequence_K, 2, aggregation)  # type: ignore[arg-type]
    normaliser = aggregation_normaliser(4, 2, aggregation, 5)  # type: ignore[arg-type]
    assert float((weights * of(1.0, 2.0, 3.0, 6.0)).sum() / normaliser) == pytest.approx(expected)


def test_kl_estimators_by_hand() -> None:
    # π 0.5, π_ref 0.25: d = log 2; k1 = 0.693147, k2 = 0.240227, k3 = 0.5 - 1 + 0.693147 = 0.193147
    ours, theirs = of(0.5).log(), of(0.25).log()
    estimates = [float(kl_estimate(ours, theirs, estimator)) for estimator in ("k1", "k2", "k3")]
    assert estimates == pytest.approx([0.6931472, 0.2402265, 0.1931472])


@pytest.mark.parametrize("difference", [-19.9, -24.0])
def test_k3_raises_a_token_that_has_fallen_far_below_the_reference(difference: float) -> None:
    """d k3 / d log π = 1 - exp(-d), and beyond 20 nats that of 20: a bound alone left 1, which lowers log π further."""
    logps = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kl_estimate(logps, torch.zeros(1), "k3").sum(), logps)
    assert float(slope) == pytest.approx(1 - math.exp(min(-difference, 20.0)), rel=1e-6)


def test_the_means_of_k1_and_k3_are_the_kl() -> None:
    p, q = of(0.7, 0.2, 0.1), of(0.2, 0.5, 0.3)
    kl = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(kl)


def test_a_penalty_in_the_reward_holds_the_policy_near_the_reference_with_the_default_estimator_alone() -> None:
    """The exact policy gradient of a reward of -k: Σ π(a) -k(a) ∇ log π(a). By hand for π = (0.5, 0.3, 0.2) and a reference of
    (0.4, 0.3, 0.3), by the logits: -π (k - E k). The third token is too rare: k1 = log(2/3) = -0.405 raises it by 0.087, and
    k3 = 1.5 - 1 - 0.405 = 0.095 lowers it by 0.013, so that the KL grows."""
    p, q = of(0.5, 0.3, 0.2), of(0.4, 0.3, 0.3)
    slope_of_kl = gradient(lambda x: (x.softmax(0) * (x.log_softmax(0) - q.log())).sum(), p.log())

    def slope(estimator: str) -> list[float]:
        reward = -kl_estimate(p.log(), q.log(), estimator)  # type: ignore[arg-type]
        return gradient(lambda x: (p * reward * x.log_softmax(0)).sum(), p.log())

    chosen = RlConfig.model_validate(
        {"prompts": "p.jsonl", "rewards": [{"verifier": "task"}], "kl": {"place": "reward"}}
    )
    assert slope(chosen.kl.estimator) == pytest.approx([-value for value in slope_of_kl])
    assert slope("k3")[2] == pytest.approx(-0.2 * (0.0945349 - 0.0304788), abs=1e-6)
    for other in ("k2", "k3"):
        assert sum(np.multiply(slope(other), slope_of_kl)) > 0, "the KL grows"


def test_the_gradient_of_k1_in_the_loss_is_zero_on_average() -> None:
    p, q = of(0.5, 0.3, 0.2), of(0.4, 0.3, 0.3)
    slope = gradient(lambda x: (p * kl_estimate(x.log_softmax(0), q.log(), "k1")).sum(), p.log())
    assert slope == pytest.approx([0.0, 0.0, 0.0])


def test_the_unbiased_gradient_is_that_of_the_kl_in_expectation() -> None:
    logits, q = of(0.3, -0.2, 0.5), of(0.2, 0.5, 0.3)

    def kl(x: torch.Tensor) -> torch.Tensor:
        p = x.softmax(0)
        return (p * (p / q).log()).sum()

    for old in (logits.softmax(0), of(0.1, 0.3, 0.6)):  # also when another policy sampled

        def sampled(x: torch.Tensor, old: torch.Tensor = old) -> torch.Tensor:
            logps = x.log_softmax(0)
            return (old * kl_with_unbiased_gradient(logps, q.log(), "k3", logps - old.log())).sum()

        assert gradient(sampled, logits) == pytest.approx(gradient(kl, logits))
    value = kl_with_unbiased_gradient(of(0.5).log(), of(0.25).log(), "k3", of(0.0))
    assert float(value) == pytest.approx(0.1931472), "with the value of k3"


def test_the_coefficient_follows_the_kl_within_a_fifth() -> None:
    assert adapted_coefficient(0.1, kl=3.0, target=1.0, samples=50, horizon=100) == pytest.approx(0.11)
    assert adapted_coefficient(0.1, kl=0.9, target=1.0, samples=50, horizon=100) == pytest.approx(0.095)
