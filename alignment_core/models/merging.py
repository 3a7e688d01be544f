"""Averages of checkpoints: of one tensor of several models, one. Pure functions; all compute in single precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEARLY_PARALLEL = 1 - 1e-6
"""Cosine of an angle from which on a straight line is as good, and the sine in the denominator is not."""


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean: ``Σ w_i W_i / Σ w_i``.

    Wortsman et al. 2022, "Model soups"; of a policy and its start, Wortsman et al. 2022, "Robust fine-tuning of zero-shot
    models". Tensors of one shape; weights ≥ 0, not all 0.
    """
    total = sum(weights)
    merged = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor, weight in zip(tensors, weights, strict=True):
        merged.add_(tensor.float(), alpha=weight / total)
    return merged


def slerp(first: Tensor, second: Tensor, share: float) -> Tensor:
    """On the arc from ``first`` to ``second``, at ``share`` of its angle θ: ``(sin((1 - t)θ) W_1 + sin(tθ) W_2) / sin θ``.

    Shoemake 1985, "Animating rotation with quaternion curves"; for models, Ramé et al. 2024, "WARP". θ is the angle between the
    tensors as vectors. Where they are nearly parallel, or one is zero, it is the weighted mean.
    """
    one, other = first.double(), second.double()
    norms = float(one.norm() * other.norm())
    cosine = float((one * other).sum()) / norms if norms else 1.0
    if abs(cosine) > NEARLY_PARALLEL:
        return linear([first, second], [1 - share, share])
    angle = math.acos(cosine)
    merged = one * math.sin((1 - share) * angle) + other * math.sin(share * angle)
    return (merged / math.sin(angle)).float()


def ties(base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], density: float, scale: float) -> Tensor:
    """What the models changed of ``base``, without what they contradict each other in.

    Yadav et al. 2023, "TIES-Merging": of each change ``W_i - base`` the share ``density`` with the largest magnitudes is kept;
    each place takes the sign that has the larger weighted sum; the weighted mean of the changes that have it, times ``scale``
    (λ), is added to ``base``.
    """
    start = base.float()
    changes = [
        _trimmed(tensor.float() - start, density) * weight for tensor, weight in zip(tensors, weights, strict=True)
    ]
    sign = torch.stack(changes).sum(0).sign()
    merged, total = torch.zeros_like(start), torch.zeros_like(start)
    for change, weight in zip(changes, weights, strict=True):
        agrees = (change.sign() == sign) & (change != 0)
        merged += change * agrees
        total += weight * agrees
    return start + scale * merged / total.where(total > 0, 1.0)


def _trimmed(change: Tensor, density: float) -> Tensor:
    """With the ``density`` · N largest magnitudes, at least one; all others are 0."""
    keep = max(1, round(density * change.numel()))
    if keep >= change.numel():
        return change
    least = change.abs().flatten().kthvalue(change.numel() - keep + 1).values
    return change.where(change.abs() >= least, 0.0)
