"""Rewards of completions: each source's own numbers, and the total that they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import FilterConfig, ShapingConfig

EPSILON = 1e-4
"""Added to each deviation that rewards are divided by, as in TRL: rewards that differ by rounding alone stay almost 0."""
ROUNDING = 1e-6
"""Rewards are equal if they differ by no more, absolutely or relatively: sums of numbers in single precision do."""


class RunningMean:
    """Mean and standard deviation of all numbers so far: Chan et al. 1983, "Algorithms for Computing the Sample Variance"."""

    def __init__(self, state: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.count, self.mean, self.squares = state

    @property
    def state(self) -> list[float]:
        """What makes an equal one; plain numbers."""
        return [self.count, self.mean, self.squares]

    def add(self, values: np.ndarray) -> None:
        """Take in more numbers."""
        if not len(values):
            return
        count = self.count + len(values)
        difference = float(values.mean()) - self.mean
        self.squares += float(((values - values.mean()) ** 2).sum()) + difference**2 * self.count * len(values) / count
        self.mean += difference * len(values) / count
        self.count = count

    @property
    def deviation(self) -> float:
        """The standard deviation, with the divisor n."""
        return math.sqrt(self.squares / max(self.count, 1.0))


def total_rewards(
    raw_SR: np.ndarray, groups_S: np.ndarray, configs: Sequence[RewardConfig], running: Sequence[RunningMean]
) -> np.ndarray:
    """The weighted sum of all sources, each clipped and normalised as its section says. [S]

    A source that ignores a completion adds nothing to its sum, and its mean and deviation are of the others alone, as in
    TRL's GRPOTrainer. Args: ``raw_SR`` [S, R] rewards by source, NaN where a source ignores a completion; ``groups_S`` [S]
    which prompt a completion answers; ``running`` one for each source, which takes these rewards in.
    """
    total_S = np.zeros(len(raw_SR))
    for index, (config, known) in enumerate(zip(configs, running, strict=True)):
        given_S = ~np.isnan(raw_SR[:, index])
        values_G, groups_G = clipped(raw_SR[given_S, index], config), groups_S[given_S]
        known.add(values_G)
        if config.normalise == "running":
            values_G = (values_G - known.mean) / (known.deviation + EPSILON)
        elif config.normalise == "batch":
            values_G = _normalised(values_G, np.zeros(len(values_G), int))
        elif config.normalise == "group":
            values_G = _normalised(values_G, groups_G)
        total_S[given_S] += config.weight * values_G
    return total_S


def means_by_source(raw_SR: np.ndarray) -> dict[int, float]:
    """The mean of what each source has, for the sources that have anything. Args: [S, R], NaN where a source has nothing."""
    given = {number: column[~np.isnan(column)] for number, column in enumerate(raw_SR.T)}
    return {number: float(values.mean()) for number, values in given.items() if len(values)}


def clipped(values_S: np.ndarray, config: RewardConfig) -> np.ndarray:
    return np.clip(values_S, *config.clip) if config.clip else values_S


def rewards_as_given(raw_SR: np.ndarray, configs: Sequence[RewardConfig]) -> np.ndarray:
    """The weighted sum of all sources, each clipped, but not normalised. [S] of [S, R]; NaN is left out of the sum."""
    return np.nansum([config.weight * clipped(raw_SR[:, n], config) for n, config in enumerate(configs)], axis=0)


def length_penalties(lengths_S: np.ndarray, truncated_S: np.ndarray, longest: int, config: ShapingConfig) -> np.ndarray:
    """Length penalties of completions, each 0 or negative. [S]

    Within the buffer the penalty grows linearly from 0 to ``overlong_penalty``: Yu et al. 2025, "DAPO", soft overlong
    punishment. Args: ``lengths_S`` [S] how many of ``longest`` tokens (``max_completion_length``) were used up, by the policy's
    turns and the observations between them; ``truncated_S`` [S] whether a completion ended because there were no more.
    """
    penalties_S = -config.truncation_penalty * np.asarray(truncated_S, float)
    if config.overlong_buffer:
        over_S = (lengths_S - (longest - config.overlong_buffer)) / config.overlong_buffer
        penalties_S = penalties_S - config.overlong_penalty * np.clip(over_S, 0.0, 1.0)
    return penalties_S


def informative_groups(
    raw_SR: np.ndarray, groups_S: np.ndarray, configs: Sequence[RewardConfig], bounds: FilterConfig
) -> set[int]:
    """The groups whose weighted rewards differ by more than rounding, and whose mean lies within the ``bounds``, ends excluded:
    Yu et al. 2025, "DAPO", equation 11."""
    total_S = rewards_as_given(raw_SR, configs)
    low = -math.inf if bounds.low is None else bounds.low
    high = math.inf if bounds.high is None else bounds.high
    rewards = {int(group): total_S[groups_S == group] for group in np.unique(groups_S)}
    differ = {group for group, one in rewards.items() if not np.allclose(one, one[0], rtol=ROUNDING, atol=ROUNDING)}
    return {group for group in differ if low < rewards[group].mean() < high}


def _normalised(values_S: np.ndarray, groups_S: np.ndarray) -> np.ndarray:
    result_S = np.zeros(len(values_S))
    for group in np.unique(groups_S):
        chosen = groups_S == group
        deviation = float(values_S[chosen].std()) + EPSILON
        result_S[chosen] = (values_S[chosen] - values_S[chosen].mean()) / deviation
    return result_S
