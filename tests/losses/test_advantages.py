"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.recipes.base import REFUSE_UNUSED
from alignment_core.recipes.sections.rl import AdvantageConfig
from alignment_core.rollout.advantages import (
    Scale,
    baselined,
    credit,
    discounted_returns,
    generalised_advantages,
    group_deviation,
    whitened,
)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", [1.0, 0.0, 0.0, 1.0, 5.0]),
        ("group", [2 / 3, -1 / 3, -1 / 3, -2.0, 2.0]),
        ("leave-one-out", [1.0, -0.5, -0.5, -4.0, 4.0]),
        ("batch", [-0.4, -1.4, -1.4, -0.4, 3.6]),
    ],
)
def test_baselines(baseline: str, expected: list[float]) -> None:
    assert baselined(REWARDS, GROUPS, baseline).tolist() == pytest.approx(expected)  # type: ignore[arg-type]


def test_a_group_of_size_1_has_zero_advantage() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1])
    assert baselined(rewards, groups, "leave-one-out").tolist() == [0.0, -1.0, 1.0]
    assert group_deviation(rewards, groups).tolist() == pytest.approx([0.0, 0.5**0.5, 0.5**0.5])


def test_the_deviation_of_a_group_has_one_less_than_its_size_as_divisor() -> None:
    # group 0: deviations 2/3, -1/3, -1/3, squares sum to 2/3, over 2 = 1/3; group 1: 4 + 4 over 1
    assert group_deviation(REWARDS, GROUPS).tolist() == pytest.approx([3**-0.5] * 3 + [8**0.5] * 2)


@pytest.mark.parametrize(("scale", "divisors"), [("none", [1.0, 1.0]), ("group", [3**-0.5 + 1e-4, 8**0.5 + 1e-4])])
def test_credit_is_the_reward_less_the_baseline_over_the_deviation_of_the_group(
    scale: Scale, divisors: list[float]
) -> None:
    """The advantage of GRPO with the division, that of Dr. GRPO without it."""
    first, second = divisors
    expected = [2 / 3 / first, -1 / 3 / first, -1 / 3 / first, -2 / second, 2 / second]
    assert credit(REWARDS, GROUPS, "group", scale).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        ("group", "group"),
        ("group", "batch"),
        ("leave-one-out", "group"),
        ("leave-one-out", "batch"),
        ("batch", "batch"),
    ],
)
def test_equal_rewards_have_no_credit_however_they_are_scaled(estimator: str, scale: Scale) -> None:
    """With other estimators 1 / EPSILON, for which recipes refuse a scale."""
    equal = torch.ones(4, dtype=torch.float64)
    accepted = AdvantageConfig.model_validate({"estimator": estimator, "scale_rewards": scale}, context=REFUSE_UNUSED)
    groups = torch.tensor([0, 0, 1, 1])
    assert credit(equal, groups, accepted.estimator, scale).abs().max() == 0  # type: ignore[arg-type]
    assert credit(equal, groups, "none", scale).tolist() == pytest.approx([1e4] * 4)
    with pytest.raises(ValueError, match="does not subtract their mean"):
        AdvantageConfig.model_validate({"estimator": "returns", "scale_rewards": scale}, context=REFUSE_UNUSED)


def test_returns_end_with_their_sequence() -> None:
    rewards, lengths = torch.tensor([0.0, 0.0, 4.0, 1.0, 2.0]), torch.tensor([3, 2])
    assert discounted_returns(rewards, lengths, 0.5).tolist() == [1.0, 2.0, 4.0, 2.0, 2.0]


def test_generalised_advantages_by_hand() -> None:
    # γ = 0.5, λ = 0.5. Sequence 0: r 0, 1; V 1, 2: δ1 = 1 - 2 = -1; δ0 = 0 + 0.5 · 2 - 1 = 0; A1 = -1, A0 = 0.25 · -1.
    # Sequence 1: r 3, V 1: A = 2
    advantages = generalised_advantages(
        torch.tensor([0.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor([2, 1]), 0.5, 0.5
    )
    assert advantages.tolist() == [-0.25, -1.0, 2.0]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    gamma=st.sampled_from([1.0, 0.9]),
)
def test_advantages_of_all_sequences_are_those_of_each_alone(lengths: list[int], seed: int, gamma: float) -> None:
    random = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=random, dtype=torch.float64)
    advantages = generalised_advantages(rewards, values, torch.tensor(lengths), gamma, 0.8)
    for r, v, together in zip(*(column.split(lengths) for column in (rewards, values, advantages)), strict=True):
        later, following = 0.0, 0.0
        for reward, value, advantage in reversed(list(zip(r.tolist(), v.tolist(), together.tolist(), strict=True))):
            later = reward + gamma * following - value + gamma * 0.8 * later
            following = value
            assert advantage == later


def test_whitening() -> None:
    values = torch.tensor([1.0, 3.0])
    assert whitened(values, with_deviation=False).tolist() == [-1.0, 1.0]
    assert whitened(values, with_deviation=True).tolist() == pytest.approx([-1.0, 1.0])
    assert whitened(torch.tensor([2.0, 2.0]), with_deviation=True).tolist() == [0.0, 0.0]
