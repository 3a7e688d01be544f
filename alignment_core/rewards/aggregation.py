"""Aggregation of rewards: clipping, normalisation, weighted totals and length penalties; and the choice of prompts by them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import FilterConfig, ShapingConfig

EPSILON = 1e-4
"""Added to deviations before division, as in TRL, so that rewards that differ only by rounding stay almost 0."""
ROUNDING = 1e-6
"""Rewards are equal if they differ by no more, absolutely or relatively: sums of numbers in single precision do."""


class RunningMean:
    """Mean and standard deviation of all numbers so far: Chan et al. 1983, "Algorithms for Computing the Sample Variance"."""

    def __init__(self, state: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.count, self.mean, self.squares = state

    @property
    def state(self) -> list[float]:
        """Plain numbers for a checkpoint."""
        return [self.count, self.mean, self.squares]

    def add(self, values: np.ndarray) -> None:
        """Add more numbers."""
        if not len(values):
            return
        # Merged with the deviations from each mean: a running sum of squares would lose its digits to cancellation.
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
    """The weighted sum of all rewards, each clipped and normalised as configured. [S]

    A reward that ignores a completion adds nothing to its sum, and its mean and deviation are those of the other completions,
    as in TRL's GRPOTrainer. Args: ``raw_SR`` [S, R], NaN where a reward ignores a completion; ``groups_S`` [S] index of the
    prompt; ``running`` statistics of each reward, to which these rewards are added.
    """
    total_S = np.zeros(len(raw_SR))
    for index, (config, known) in enumerate(zip(configs, running, strict=True)):
        given_S = ~np.isnan(raw_SR[:, index])
        given_values, given_groups = clipped(raw_SR[given_S, index], config), groups_S[given_S]
        known.add(given_values)
        if config.normalise == "running":
            given_values = (given_values - known.mean) / (known.deviation + EPSILON)
        elif config.normalise == "batch":
            given_values = _normalised(given_values, np.zeros(len(given_values), int))
        elif config.normalise == "group":
            given_values = _normalised(given_values, given_groups)
        total_S[given_S] += config.weight * given_values
    return total_S


def score_units(
    config: RewardConfig, known: RunningMean, spread: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """The score of a reward model that is a reward of 0, and the difference of scores that is a reward of 1.

    As in :func:`total_rewards`, but ``batch`` and ``group`` have the statistics of all steps. Args: ``known`` statistics of the
    reward; ``spread`` mean and deviation of the model's scores, for ``normalise: model``.
    """
    mean, deviation = (0.0, 1.0) if config.normalise == "none" else (known.mean, known.deviation)
    if config.normalise == "model":
        mean, deviation = spread
    # Scores that differ by rounding alone say nothing about their deviation.
    return mean, (deviation if deviation > EPSILON else 1.0) / (config.weight or 1.0)


def means_by_source(raw_SR: np.ndarray) -> dict[int, float]:
    """The mean of each reward that has values, by number. Args: [S, R], NaN where a reward has none."""
    given = {number: column[~np.isnan(column)] for number, column in enumerate(raw_SR.T)}
    return {number: float(values.mean()) for number, values in given.items() if len(values)}


def clipped(values_S: np.ndarray, config: RewardConfig) -> np.ndarray:
    return np.clip(values_S, *config.clip) if config.clip else values_S


def rewards_as_given(raw_SR: np.ndarray, configs: Sequence[RewardConfig]) -> np.ndarray:
    """The weighted sum of all rewards, each clipped, but not normalised. [S] of [S, R]; NaN is left out of the sum."""
    return np.nansum([config.weight * clipped(raw_SR[:, n], config) for n, config in enumerate(configs)], axis=0)


def informative_groups(
    raw_SR: np.ndarray, groups_S: np.ndarray, configs: Sequence[RewardConfig], bounds: FilterConfig
) -> set[int]:
    """Dynamic sampling: the groups whose weighted rewards differ by more than rounding, and whose mean lies within the
    ``bounds``, ends excluded: Yu et al. 2025, "DAPO", equation 11."""
    total_S = rewards_as_given(raw_SR, configs)
    low = -math.inf if bounds.low is None else bounds.low
    high = math.inf if bounds.high is None else bounds.high
    rewards = {int(group): total_S[groups_S == group] for group in np.unique(groups_S)}
    differ = {
        group for group, values in rewards.items() if not np.allclose(values, values[0], rtol=ROUNDING, atol=ROUNDING)
    }
    return {group for group in differ if low < rewards[group].mean() < high}


def length_penalties(lengths_S: np.ndarray, truncated_S: np.ndarray, longest: int, config: ShapingConfig) -> np.ndarray:
    """Length penalties of completions, each 0 or negative. [S]

    Within the buffer the penalty grows linearly from 0 to ``overlong_penalty``: Yu et al. 2025, "DAPO", soft overlong
    punishment. Args: ``lengths_S`` [S] number of used tokens of ``longest`` (``max_completion_length``), observations included;
    ``truncated_S`` [S] whether a completion ended because none were left.
    """
    penalties_S = -config.truncation_penalty * np.asarray(truncated_S, float)
    if config.overlong_buffer:
        over_S = (lengths_S - (longest - config.overlong_buffer)) / config.overlong_buffer
        penalties_S = penalties_S - config.overlong_penalty * np.clip(over_S, 0.0, 1.0)
    return penalties_S


def _normalised(values_S: np.ndarray, groups_S: np.ndarray) -> np.ndarray:
    result_S = np.zeros(len(values_S))
    for group in np.unique(groups_S):
        chosen = groups_S == group
        deviation = float(values_S[chosen].std()) + EPSILON
        result_S[chosen] = (values_S[chosen] - values_S[chosen].mean()) / deviation
    return result_S
