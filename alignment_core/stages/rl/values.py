"""What a critic learns: returns as they are, or in units of their own mean and deviation."""

from __future__ import annotations

import numpy as np

from alignment_core.rewards.aggregation import RunningMean

LEAST_DEVIATION = 1e-6


class ValueScale:
    """Between a critic's own numbers and values. With ``normalise`` the critic learns returns less the mean of all returns so
    far, over their deviation (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games")."""

    def __init__(self, normalise: bool) -> None:
        self.normalise, self.returns = normalise, RunningMean()

    @property
    def deviation(self) -> float:
        """What a critic's numbers are multiplied by; never 0."""
        return max(self.returns.deviation, LEAST_DEVIATION)

    @property
    def state(self) -> list[float]:
        """What a run that goes on needs to know; plain numbers."""
        return self.returns.state

    def restore(self, state: list[float]) -> None:
        """Go on from where a run was."""
        self.returns = RunningMean(state)

    def values_of(self, numbers_K: np.ndarray) -> np.ndarray:
        """The values that a critic's numbers stand for: before it has learnt anything, they themselves. [K] → [K]."""
        if not self.normalise or not self.returns.count:
            return numbers_K
        return (numbers_K * self.deviation + self.returns.mean).astype(np.float32)

    def targets_of(self, returns_K: np.ndarray) -> np.ndarray:
        """What a critic learns of these returns, which are taken in. [K] → [K]."""
        if not self.normalise:
            return returns_K
        self.returns.add(returns_K.astype(np.float64))
        return ((returns_K - self.returns.mean) / self.deviation).astype(np.float32)
