"""Correcting for the difference between the policy that sampled (the engine) and the one that is trained.

The two have the same weights, or nearly, but other kernels and precision. ``log_ratio_K`` is log π_trained - log π_sampled of
each sampled token in nats, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from alignment_core.losses.logprobs import sum_by_sequence

Level = Literal["token", "sequence"]
Measure = Literal["ratio", "kl", "tv"]

BISECTIONS = 40
ALMOST_ONE = 1 - 1e-6


def correction_weights(
    log_ratio_K: Tensor,
    sampled_K: Tensor,
    sequence_K: Tensor,
    count: int,
    *,
    level: Level,
    action: Literal["mask", "clip"],
    measure: Measure,
    low: float,
    high: float,
) -> Tensor:
    """What each token's loss is multiplied by: its importance ratio, limited where the policies differ too much.

    ``measure`` is what the bounds apply to, at a token or over its sequence: the ratio (of a sequence: the product), which may
    lie in [``low``, ``high``]; or, from the probability of the sampled token alone, the binary KL(sampled ‖ trained) or total
    variation (of a sequence: the mean), at most ``high``. ``mask`` gives what lies outside weight 0; ``clip`` scales its
    log-ratio down until it lies at the bound.

    Truncated importance sampling is token, clip, ratio, low 0 (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training"); IcePop is token, mask, ratio (Ling team 2025, "Every Step Evolves"); masking a sequence by
    its divergence is a trust region. Args: [K]; ``sampled_K`` log-probabilities under the sampling policy. Returns [K].
    """
    units_K, units = (sequence_K, count) if level == "sequence" else (torch.arange(len(log_ratio_K)), len(log_ratio_K))
    units_K = units_K.to(log_ratio_K.device)

    def inside(scale_U: Tensor) -> Tensor:
        scaled_K = log_ratio_K * scale_U[units_K]
        if measure == "ratio":
            sums_U = sum_by_sequence(scaled_K, units_K, units)
            return (sums_U.exp() >= low) & (sums_U.exp() <= high)
        return _mean(_divergence(scaled_K, sampled_K, measure), units_K, units) <= high

    scale_U = torch.ones(units, dtype=log_ratio_K.dtype, device=log_ratio_K.device)
    good_U = inside(scale_U)
    if action == "clip":
        scale_U = _largest_scale(inside, scale_U, good_U)
    scaled_K = log_ratio_K * scale_U[units_K]
    if measure == "ratio":
        scaled_K = sum_by_sequence(scaled_K, units_K, units)[units_K]
    weights_K = scaled_K.exp()
    return weights_K if action == "clip" else torch.where(good_U[units_K], weights_K, torch.zeros_like(weights_K))


def _largest_scale(inside: Callable[[Tensor], Tensor], ones_U: Tensor, good_U: Tensor) -> Tensor:
    """By bisection, the largest scale in [0, 1] at which each unit is inside."""
    low_U, high_U = torch.zeros_like(ones_U), ones_U
    for _ in range(BISECTIONS):
        middle_U = (low_U + high_U) / 2
        fits_U = inside(middle_U)
        low_U, high_U = torch.where(fits_U, middle_U, low_U), torch.where(fits_U, high_U, middle_U)
    return torch.where(good_U, ones_U, low_U)


def _divergence(log_ratio_K: Tensor, sampled_K: Tensor, measure: Measure) -> Tensor:
    """Between "the sampled token" and "any other" under the two policies. [K]"""
    p_K = sampled_K.exp().clamp(max=ALMOST_ONE)
    q_K = (sampled_K + log_ratio_K).exp().clamp(max=ALMOST_ONE)
    if measure == "tv":
        return (p_K - q_K).abs()
    return p_K * (p_K / q_K).log() + (1 - p_K) * ((1 - p_K) / (1 - q_K)).log()


def _mean(values_K: Tensor, units_K: Tensor, units: int) -> Tensor:
    sizes_U = sum_by_sequence(torch.ones_like(values_K), units_K, units).clamp(min=1)
    return sum_by_sequence(values_K, units_K, units) / sizes_U
