"""Dynamic sampling: the choice of prompts whose completions have different rewards, of which alone a policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import FilterConfig
from alignment_core.rewards.aggregation import rewards_as_given

ROUNDING = 1e-6
"""Rewards are equal if they differ by no more, absolutely or relatively: sums of numbers in single precision do."""


def informative_groups(
    raw_SR: np.ndarray, groups_S: np.ndarray, configs: Sequence[RewardConfig], bounds: FilterConfig
) -> set[int]:
    """The groups whose weighted rewards differ by more than rounding, and whose mean lies within the ``bounds``, ends excluded:
    Yu et al. 2025, "DAPO", equation 11."""
    total_S = rewards_as_given(raw_SR, configs)
    low = -math.inf if bounds.low is None else bounds.low
    high = math.inf if bounds.high is None else bounds.high
    rewards = {int(group): total_S[groups_S == group] for group in np.unique(groups_S)}
    differ = {
        group for group, values in rewards.items() if not np.allclose(values, values[0], rtol=ROUNDING, atol=ROUNDING)
    }
    return {group for group in differ if low < rewards[group].mean() < high}
