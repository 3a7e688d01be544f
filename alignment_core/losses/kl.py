"""Estimates of KL(π ‖ π_ref) from tokens that were sampled from π: Schulman 2020, "Approximating KL Divergence"."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from alignment_core.losses.logprobs import LARGEST_LOG_RATIO, ratio
from alignment_core.recipes.sections.rl import MOST_ADAPTED

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logps_K: Tensor, reference_K: Tensor, estimator: KlEstimator) -> Tensor:
    """Per token, with d = log π - log π_ref: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d.

    k1 and k3 are unbiased; k2 is nearly so where the two policies are close. Beyond d = -20 the exponential goes on as its
    tangent, so that its gradient still raises log π. Args: [K] in nats. Returns [K] in nats.
    """
    difference_K = logps_K - reference_K
    if estimator == "k1":
        return difference_K
    if estimator == "k2":
        return difference_K**2 / 2
    beyond_K = (-difference_K - LARGEST_LOG_RATIO).clamp(min=0)
    return ratio(-difference_K) * (1 + beyond_K) - 1 + difference_K


def kl_with_unbiased_gradient(
    logps_K: Tensor, reference_K: Tensor, estimator: KlEstimator, log_ratio_K: Tensor
) -> Tensor:
    """The value of ``estimator``, with a gradient whose expectation over the samples is that of the KL.

    E[w ∇ k2] = E[w d ∇ log π] = ∇ KL with w = π / π_old for samples of π_old, while E[∇ k1] = 0 and E[∇ k3] is the gradient
    of the KL the other way round. Args: [K] in nats; ``log_ratio_K`` = log π - log π_old, 0 for samples of π itself.
    Returns [K] in nats.
    """
    weighted_K = ratio(log_ratio_K).detach() * kl_estimate(logps_K, reference_K, "k2")
    # Zero plus the estimate: the first two terms cancel in the value and leave the gradient of k2.
    return weighted_K - weighted_K.detach() + kl_estimate(logps_K, reference_K, estimator).detach()


def adapted_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The coefficient of the next step, so that the mean KL per token (in nats) comes to ``target``.

    ``β ← β (1 + clip(KL / target - 1, ±0.2) n / horizon)``: Ziegler et al. 2019, "Fine-Tuning Language Models from Human
    Preferences", section 2.2.
    """
    error = min(max(kl / target - 1, -MOST_ADAPTED), MOST_ADAPTED)
    return coefficient * (1 + error * samples / horizon)
