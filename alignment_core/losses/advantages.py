"""Advantages of sampled sequences, and of their trained tokens, which stand one after the other.

``lengths_S`` says how many trained tokens each sequence has. ``group_S`` says which sequences answer the same prompt.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from alignment_core.columns import parts
from alignment_core.losses.logprobs import sum_by_sequence

AT_ONCE = 255
"""Sequences whose recursions go together: a call of numpy takes as long for one number as for so many. It is odd, so that the
numbers of a sequence, which lie so far apart, do not share lines of the processor's cache."""

EPSILON = 1e-4
"""Added to deviations before division, as in TRL, so that rewards that differ by rounding alone are worth almost nothing."""

Baseline = Literal["none", "group", "leave-one-out", "batch"]


def credit(rewards_S: Tensor, group_S: Tensor, baseline: Baseline, divide_by_deviation: bool) -> Tensor:
    """What a sequence's tokens are credited with for its reward: the reward less a baseline, over the deviation of its group.

    With ``group`` and the division it is GRPO's ``(r - mean) / (std + EPSILON)`` (Shao et al. 2024, "DeepSeekMath", section
    4.1.2), without the division that of Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO). For process
    supervision (section 4.1.3) give the reasoning steps of all sequences in place of sequences. Args: [S]. Returns [S].
    """
    credit_S = baselined(rewards_S, group_S, baseline)
    return credit_S / (group_deviation(rewards_S, group_S) + EPSILON) if divide_by_deviation else credit_S


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


def whitened(advantages_K: Tensor, with_deviation: bool, epsilon: float = 1e-8) -> Tensor:
    """Advantages of the whole batch less their mean and, if asked, over their standard deviation (divisor n). [K] → [K]."""
    centred_K = advantages_K - advantages_K.mean()
    return centred_K / (centred_K.pow(2).mean().sqrt() + epsilon) if with_deviation else centred_K


def _group_means(values_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    """The size and mean of each sequence's group. [S] each."""
    groups = int(group_S.max()) + 1
    size_S = sum_by_sequence(torch.ones_like(values_S), group_S, groups)[group_S]
    return size_S, sum_by_sequence(values_S, group_S, groups)[group_S] / size_S
