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
"""Halvings of the interval [0, 1], after which it is shorter than the rounding of fp32."""
ALMOST_ONE = 1 - 1e-6
"""Upper bound of probabilities, so that log(1 - p) stays finite."""


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
    """The factor of each token's loss: its importance ratio, limited where the policies differ too much.

    The bounds apply to ``measure``, at a token or over its sequence: the ratio (of a sequence: the product), which may lie in
    [``low``, ``high``]; or, from the probability of the sampled token alone, the binary KL(sampled ‖ trained) or total
    variation (of a sequence: the mean), at most ``high``. Outside the bounds ``mask`` gives weight 0, and ``clip`` scales the
    log-ratio down until it lies at the bound.

    Truncated importance sampling is token, clip, ratio, low 0 (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training"); IcePop is token, mask, ratio (Ling team 2025, "Every Step Evolves"); masking a sequence by
    its divergence is a trust region. Args: [K]; ``sampled_K`` log-probabilities under the sampling policy. Returns [K].
    """
    units_K, units = (sequence_K, count) if level == "sequence" else (torch.arange(len(log_ratio_K)), len(log_ratio_K))
    units_K = units_K.to(log_ratio_K.device)

    def inside(scale_M: Tensor) -> Tensor:
        scaled_K = log_ratio_K * scale_M[units_K]
        if measure == "ratio":
            sums_M = sum_by_sequence(scaled_K, units_K, units)
            return (sums_M.exp() >= low) & (sums_M.exp() <= high)
        return _mean(_divergence(scaled_K, sampled_K, measure), units_K, units) <= high

    scale_M = torch.ones(units, dtype=log_ratio_K.dtype, device=log_ratio_K.device)
    good_M = inside(scale_M)
    if action == "clip":
        scale_M = _largest_scale(inside, scale_M, good_M)
    scaled_K = log_ratio_K * scale_M[units_K]
    if measure == "ratio":
        scaled_K = sum_by_sequence(scaled_K, units_K, units)[units_K]
    weights_K = scaled_K.exp()
    return weights_K if action == "clip" else torch.where(good_M[units_K], weights_K, torch.zeros_like(weights_K))


def _largest_scale(inside: Callable[[Tensor], Tensor], ones_M: Tensor, good_M: Tensor) -> Tensor:
    """By bisection, the largest scale in [0, 1] at which each unit is inside."""
    low_M, high_M = torch.zeros_like(ones_M), ones_M
    for _ in range(BISECTIONS):
        middle_M = (low_M + high_M) / 2
        fits_M = inside(middle_M)
        low_M, high_M = torch.where(fits_M, middle_M, low_M), torch.where(fits_M, high_M, middle_M)
    return torch.where(good_M, ones_M, low_M)  # scale 0 is a ratio of 1, inside if low ≤ 1 ≤ high


def _divergence(log_ratio_K: Tensor, sampled_K: Tensor, measure: Measure) -> Tensor:
    """Between "the sampled token" and "any other" under the two policies. [K]"""
    p_K = sampled_K.exp().clamp(max=ALMOST_ONE)
    q_K = (sampled_K + log_ratio_K).exp().clamp(max=ALMOST_ONE)
    if measure == "tv":
        return (p_K - q_K).abs()
    return p_K * (p_K / q_K).log() + (1 - p_K) * ((1 - p_K) / (1 - q_K)).log()


def _mean(values_K: Tensor, units_K: Tensor, units: int) -> Tensor:
    sizes_M = sum_by_sequence(torch.ones_like(values_K), units_K, units).clamp(min=1)
    return sum_by_sequence(values_K, units_K, units) / sizes_M
