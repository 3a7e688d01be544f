"""Metrics of the rewards of a step: each by its name, and the share of completions without one."""

from __future__ import annotations

import pytest

from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.stages.rl.rewards import reward_metrics
from alignment_core.user_code.errors import Failed
from tests.rollout.rollouts import rollout

REWARDS = [
    CHOICE.validate(fields)
    for fields in ({"verifier": "math"}, {"function": "f.py:polite"}, {"urls": "http://a/?key=s"})
]
NAMES = ["math", "polite", "endpoint"]


def test_each_reward_has_mean_and_deviation_over_its_scored_completions() -> None:
    """By hand, with TRL's divisor n - 1 (``trl.trainer.utils.nanstd``): `math` gave 1, 0 and 1: mean 2/3, deviation
    √((2/9 + 4/9) / 2) = √(1/3). `polite` gave 4 and 2, and nothing to the first: 3 and √2. The endpoint failed for all. One of
    three completions has a failed reward: 1/3."""
    late = Failed("timeout", "gave no answer")
    rewards: list[list[float | Failed | None]] = [[1.0, None, None], [0.0, 4.0, None], [1.0, 2.0, late]]
    rollouts = [rollout([True], rewards=dict(zip(NAMES, rewards_of, strict=True))) for rewards_of in rewards]
    assert reward_metrics(rollouts, REWARDS) == {
        "rewards/math/mean": pytest.approx(2 / 3),
        "rewards/math/std": pytest.approx((1 / 3) ** 0.5),
        "rewards/polite/mean": 3.0,
        "rewards/polite/std": pytest.approx(2**0.5),
        "reward/missing_share": pytest.approx(1 / 3),
    }


def test_a_reward_of_one_completion_alone_has_a_mean_and_no_deviation() -> None:
    metrics = reward_metrics([rollout([True], rewards=dict(zip(NAMES, [1.0, None, None], strict=True)))], REWARDS)
    assert metrics == {"rewards/math/mean": 1.0, "reward/missing_share": 0.0}
