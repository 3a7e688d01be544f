"""From rewarded completions to advantages: the computation of a step between sampling and training.

Estimators are pure functions. ``lengths_S`` says how many trained tokens each sequence has, which stand one after the other;
``group_S`` says which sequences answer the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from alignment_core.columns import parts
from alignment_core.losses.kl import kl_estimate
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig
from alignment_core.rewards.aggregation import RunningMean
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.rollout import Rollout
from alignment_core.training.step_data import StepData

LEAST_DEVIATION = 1e-6
"""Lower bound of the deviation of returns, which is 0 as long as all of them are equal."""
AT_ONCE = 255
"""Sequences whose recursions run together: a numpy call takes about as long for 255 numbers as for one. It is odd, so that the
numbers of a sequence, which are this far apart, do not compete for the same lines of the processor's cache."""

EPSILON = 1e-4
"""Added to deviations before division, as in TRL, so that rewards that differ by rounding alone are worth almost nothing."""

Baseline = Literal["none", "group", "leave-one-out", "batch"]
Scale = Literal["none", "group", "batch"]


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
    """The part of each completion's total reward that belongs to its steps."""


def reasoning_step_rewards(rollouts: Sequence[Rollout], configs: Sequence[RewardConfig]) -> ReasoningStepRewards | None:
    """The rewards of the reasoning steps of completions of one turn; None if the recipe rewards no steps."""
    if not any(config.by_step for config in configs):
        return None
    starts_S = np.cumsum([0, *(int(rollout.trained_mask.sum()) for rollout in rollouts)])
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

    def numbers(name: str) -> Tensor:
        return torch.from_numpy(batch.numbers[name].astype(np.float64))

    lengths_S = torch.from_numpy(batch.lengths_S)
    reward_S = torch.tensor(rewards, dtype=torch.float64)
    group_S = torch.unique(torch.from_numpy(batch.groups_S), return_inverse=True)[1]

    baseline = config.estimator if config.estimator in ("group", "leave-one-out", "batch") else "none"
    credited = partial(credit, baseline=baseline, scale=config.scale_rewards)
    at_end_S = reward_S if reasoning_steps is None else reward_S - torch.from_numpy(reasoning_steps.counted_S)
    credit_S = credited(at_end_S, group_S)
    rewards_K = torch.zeros(int(lengths_S.sum()), dtype=torch.float64)
    trained_S = lengths_S > 0
    rewards_K[torch.cumsum(lengths_S, 0)[trained_S] - 1] = credit_S[trained_S]
    if reasoning_steps is not None:
        group_U = group_S[torch.from_numpy(reasoning_steps.sequence_U)]
        credit_U = credited(torch.from_numpy(reasoning_steps.reward_U), group_U)
        trained_U = trained_S[torch.from_numpy(reasoning_steps.sequence_U)]
        rewards_K.index_add_(0, torch.from_numpy(reasoning_steps.place_U)[trained_U], credit_U[trained_U])
    # The divisor of the deviation is n: with n - 1, that of a single completion would be NaN.
    metrics = {"reward": float(reward_S.mean()), "reward_deviation": float(reward_S.std(correction=0))}
    if kl.place == "reward" and coefficient > 0:
        kl_K = kl_estimate(numbers("old_logps"), numbers("reference_logps"), kl.estimator)
        metrics["kl"] = float(kl_K.mean())
        rewards_K -= kl_K.mul_(coefficient)
    if config.estimator == "gae":
        values_K = numbers("old_values")
        advantages_K = generalised_advantages(rewards_K, values_K, lengths_S, config.gamma, config.gae_lambda)
        batch.numbers["returns"] = values_K.add_(advantages_K).float().numpy()
    else:
        advantages_K = discounted_returns(rewards_K, lengths_S, config.gamma)
    if config.whiten != "none":
        advantages_K = whitened(advantages_K, config.whiten == "mean-and-deviation")
    batch.numbers["advantages"] = advantages_K.float().numpy()
    return metrics


def credit(rewards_S: Tensor, group_S: Tensor, baseline: Baseline, scale: Scale) -> Tensor:
    """The credit of a sequence's tokens for its reward: the reward less a baseline, over the deviation of its group or batch.

    With baseline and scale ``group`` it is GRPO's ``(r - mean) / (std + EPSILON)`` (Shao et al. 2024, "DeepSeekMath",
    section 4.1.2), without the division that of Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO). For process
    supervision (section 4.1.3) give the reasoning steps of all sequences in place of sequences. Args: [S]. Returns [S].
    """
    credit_S = baselined(rewards_S, group_S, baseline)
    if scale == "none":
        return credit_S
    of_S = group_S if scale == "group" else torch.zeros_like(group_S)
    return credit_S / (group_deviation(rewards_S, of_S) + EPSILON)


def baselined(rewards_S: Tensor, group_S: Tensor, baseline: Baseline) -> Tensor:
    """Rewards less a baseline that does not depend on the sequence's own actions more than its share in a mean.

    ``group``: the mean over the group (Shao et al. 2024, "DeepSeekMath"). ``leave-one-out``: the mean over the others of
    the group (Ahmadian et al. 2024, "Back to Basics"), 0 where there are none. ``batch``: the mean over the batch. Args:
    [S]. Returns [S].
    """
    if baseline == "none":
        return rewards_S
    if baseline == "batch":
        return rewards_S - rewards_S.mean()
    size_S, mean_S = _group_means(rewards_S, group_S)
    if baseline == "group":
        return rewards_S - mean_S
    others_S = (size_S * mean_S - rewards_S) / (size_S - 1).clamp(min=1)
    return torch.where(size_S > 1, rewards_S - others_S, torch.zeros_like(rewards_S))


def group_deviation(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """The standard deviation of each sequence's group, with n - 1 as the divisor as in DeepSeekMath's code and TRL; 0 in
    a group of one. Args: [S]. Returns [S]."""
    size_S, mean_S = _group_means(rewards_S, group_S)
    _, squares_S = _group_means((rewards_S - mean_S) ** 2, group_S)
    return (squares_S * size_S / (size_S - 1).clamp(min=1)).sqrt()


def discounted_returns(rewards_K: Tensor, lengths_S: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + γ G_{t+1}`` within each sequence. Args: rewards [K]. Returns [K]."""
    return generalised_advantages(rewards_K, torch.zeros_like(rewards_K), lengths_S, gamma, 1.0)


def generalised_advantages(
    rewards_K: Tensor, values_K: Tensor, lengths_S: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """``A_t = δ_t + γ λ A_{t+1}`` with ``δ_t = r_t + γ V_{t+1} - V_t``; nothing follows a sequence's last token.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16. The
    return that a critic learns is ``A_t + V_t``. Args: rewards and values [K]. Returns [K].
    """
    ends = lengths_S.cumsum(0).numpy()
    advantages_K = torch.zeros_like(values_K)
    advantages_K[:-1] = values_K[1:]
    advantages_K[ends[lengths_S.numpy() > 0] - 1] = 0.0
    advantages_K = advantages_K.mul_(gamma).add_(rewards_K).sub_(values_K)
    of_sequence = [part[::-1] for part in parts(advantages_K.numpy(), ends)]
    for first in range(0, len(of_sequence), AT_ONCE):
        together = of_sequence[first : first + AT_ONCE]
        from_end = np.zeros((max(map(len, together)), len(together)), advantages_K.numpy().dtype)
        for number, backwards in enumerate(together):
            from_end[: len(backwards), number] = backwards
        for later, earlier in pairwise(from_end):
            earlier += gamma * gae_lambda * later
        for number, backwards in enumerate(together):
            backwards[:] = from_end[: len(backwards), number]
    return advantages_K


def whitened(advantages_K: Tensor, with_deviation: bool) -> Tensor:
    """Advantages of the whole batch less their mean and, ``with_deviation``, over their deviation (divisor n). [K] → [K]."""
    centred_K = advantages_K - advantages_K.mean()
    return centred_K / (centred_K.pow(2).mean().sqrt() + 1e-8) if with_deviation else centred_K


def _group_means(values_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    """The size and mean of each sequence's group. [S] each."""
    groups = int(group_S.max()) + 1
    size_S = sum_by_sequence(torch.ones_like(values_S), group_S, groups)[group_S]
    return size_S, sum_by_sequence(values_S, group_S, groups)[group_S] / size_S


class ValueScale:
    """Converts between values and the outputs of a critic. With ``normalise`` the critic learns returns minus the mean of all
    returns so far, divided by their standard deviation (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative
    Multi-Agent Games")."""

    def __init__(self, normalise: bool, outputs_values: bool = False) -> None:
        """``outputs_values``: the critic's outputs are values, as those of a reward model are before any training. They are
        standardised in its loss alone: read as standardised values later, the same outputs would be others."""
        self.normalise = normalise
        self.outputs_values = outputs_values
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

    @property
    def of_loss(self) -> tuple[float, float]:
        """The mean and deviation by which the critic's outputs are standardised in its loss."""
        return (self.returns.mean, self.deviation) if self.normalise and self.outputs_values else (0.0, 1.0)

    def values_of(self, outputs_K: np.ndarray) -> np.ndarray:
        """The values for a critic's outputs; unchanged before the first update. [K] → [K]."""
        if not self.normalise or self.outputs_values or not self.returns.count:
            return outputs_K
        return (outputs_K * self.deviation + self.returns.mean).astype(np.float32)

    def targets_of(self, returns_K: np.ndarray) -> np.ndarray:
        """Add the returns to the statistics; the critic's targets for them. [K] → [K]."""
        if not self.normalise:
            return returns_K
        self.returns.add(returns_K.astype(np.float64))
        return ((returns_K - self.returns.mean) / self.deviation).astype(np.float32)
