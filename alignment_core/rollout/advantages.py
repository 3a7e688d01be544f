"""From rewarded completions to advantages: the computation of a step between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig
from alignment_core.rewards.aggregation import RunningMean
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.rollout import Rollout
from alignment_core.training.step_data import StepData

if TYPE_CHECKING:
    from torch import Tensor

LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class ReasoningStepRewards:
    """Rewards of the reasoning steps of completions, U of them, each at a trained token."""

    place_U: np.ndarray
    """Index of the token among the trained tokens of all completions."""
    reward_U: np.ndarray
    """Weighted."""
    sequence_U: np.ndarray
    """Index of the completion."""
    counted_S: np.ndarray
    """The part of each completion's total reward that its steps stand for."""


def reasoning_step_rewards(rollouts: Sequence[Rollout], configs: Sequence[RewardConfig]) -> ReasoningStepRewards | None:
    """The rewards of the reasoning steps of completions of one turn; None if the recipe rewards no steps."""
    if not any(config.by_step for config in configs):
        return None
    starts_S = np.cumsum([0, *(int(rollout.loss_mask.sum()) for rollout in rollouts)])
    places: list[int] = []
    rewards: list[float] = []
    sequences: list[int] = []
    counted_S = np.zeros(len(rollouts))
    for sequence, rollout in enumerate(rollouts):
        for result, config in zip(rollout.rewards.values(), configs, strict=True):
            if config.by_step and isinstance(result, RewardValue):
                counted_S[sequence] += config.weight * result.reward
                for place, reward in result.steps:
                    places.append(starts_S[sequence] + place)
                    rewards.append(config.weight * reward)
                    sequences.append(sequence)
    return ReasoningStepRewards(np.array(places, int), np.array(rewards, float), np.array(sequences, int), counted_S)


def add_advantages(
    batch: StepData,
    rewards: Sequence[float],
    config: AdvantageConfig,
    kl: KlConfig,
    coefficient: float,
    reasoning_steps: ReasoningStepRewards | None = None,
) -> dict[str, float]:
    """Compute the ``advantages`` (and a critic's ``returns``) of all trained tokens, and add them to the batch; metrics.

    The reward of a completion is given to its last trained token. With the KL in the reward, ``coefficient`` times its
    estimate is subtracted at each token. Baselines use the rewards alone, so that the KL affects only the tokens that cause
    it. Rewards of ``reasoning_steps`` are given to their own tokens; their baseline and deviation are those of all steps of a
    group, as in DeepSeekMath's process supervision (Shao et al. 2024). Args: the total reward of each completion, [S].
    """
    import torch

    from alignment_core.losses import advantages as estimators
    from alignment_core.losses.kl import kl_estimate

    def numbers(name: str) -> Tensor:
        return torch.from_numpy(batch.numbers[name].astype(np.float64))

    lengths_S = torch.from_numpy(batch.lengths_S)
    reward_S = torch.tensor(rewards, dtype=torch.float64)
    group_S = torch.unique(torch.from_numpy(batch.groups_S), return_inverse=True)[1]

    baseline = config.estimator if config.estimator in ("group", "leave-one-out", "batch") else "none"
    credited = partial(estimators.credit, baseline=baseline, divide_by_deviation=config.divide_by_deviation)
    at_end_S = reward_S if reasoning_steps is None else reward_S - torch.from_numpy(reasoning_steps.counted_S)
    credit_S = credited(at_end_S, group_S)
    rewards_K = torch.zeros(int(lengths_S.sum()), dtype=torch.float64)
    trained_S = lengths_S > 0
    rewards_K[torch.cumsum(lengths_S, 0)[trained_S] - 1] = credit_S[trained_S]
    if reasoning_steps is not None:
        group_U = group_S[torch.from_numpy(reasoning_steps.sequence_U)]
        credit_U = credited(torch.from_numpy(reasoning_steps.reward_U), group_U)
        rewards_K.index_add_(0, torch.from_numpy(reasoning_steps.place_U), credit_U)
    metrics = {"reward": float(reward_S.mean()), "reward_deviation": float(reward_S.std(correction=0))}
    if kl.place == "reward" and coefficient > 0:
        kl_K = kl_estimate(numbers("old_logps"), numbers("reference_logps"), kl.estimator)
        metrics["kl"] = float(kl_K.mean())
        rewards_K -= kl_K.mul_(coefficient)
    if config.estimator == "gae":
        values_K = numbers("old_values")
        advantages_K = estimators.generalised_advantages(
            rewards_K, values_K, lengths_S, config.gamma, config.gae_lambda
        )
        batch.numbers["returns"] = values_K.add_(advantages_K).float().numpy()
    else:
        advantages_K = estimators.discounted_returns(rewards_K, lengths_S, config.gamma)
    if config.whiten != "none":
        advantages_K = estimators.whitened(advantages_K, config.whiten == "mean-and-deviation")
    batch.numbers["advantages"] = advantages_K.float().numpy()
    return metrics


class ValueScale:
    """Converts between values and the outputs of a critic. With ``normalise`` the critic learns returns minus the mean of all
    returns so far, divided by their standard deviation (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative
    Multi-Agent Games")."""

    def __init__(self, normalise: bool) -> None:
        self.normalise = normalise
        self.returns = RunningMean()

    @property
    def deviation(self) -> float:
        """The factor of a critic's outputs; never 0."""
        return max(self.returns.deviation, LEAST_DEVIATION)

    @property
    def state(self) -> list[float]:
        """Plain numbers for a checkpoint."""
        return self.returns.state

    def restore(self, state: list[float]) -> None:
        """Continue from a checkpoint's state."""
        self.returns = RunningMean(state)

    def values_of(self, outputs_K: np.ndarray) -> np.ndarray:
        """The values for a critic's outputs; unchanged before the first update. [K] → [K]."""
        if not self.normalise or not self.returns.count:
            return outputs_K
        return (outputs_K * self.deviation + self.returns.mean).astype(np.float32)

    def targets_of(self, returns_K: np.ndarray) -> np.ndarray:
        """Add the returns to the statistics; the critic's targets for them. [K] → [K]."""
        if not self.normalise:
            return returns_K
        self.returns.add(returns_K.astype(np.float64))
        return ((returns_K - self.returns.mean) / self.deviation).astype(np.float32)
