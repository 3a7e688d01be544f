"""Averages of checkpoints: one tensor of several models in, their average out. Pure functions, in single precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

NEARLY_PARALLEL = 1 - 1e-6
"""Cosine above which the straight line is used instead of the arc: dividing by the sine would lose precision."""


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


def slerp(base: Tensor, first: Tensor, second: Tensor, share: float) -> Tensor:
    """``base`` W plus a change of it, on the arc from the change δ_1 to δ_2, at ``share`` t of its angle θ:
    ``W + (sin((1 - t)θ) δ_1 + sin(tθ) δ_2) / sin θ``.

    Ramé et al. 2024, "WARP", section 3.2, which interpolates task vectors; the arc is that of Shoemake 1985, "Animating
    rotation with quaternion curves". Where the changes are nearly parallel, or one is zero, it is the weighted mean.
    """
    start = base.double()
    delta_1 = first.double() - start
    delta_2 = second.double() - start
    norms = float(delta_1.norm() * delta_2.norm())
    cosine = float((delta_1 * delta_2).sum()) / norms if norms else 1.0
    if abs(cosine) > NEARLY_PARALLEL:
        return linear([first, second], [1 - share, share])
    angle = math.acos(cosine)
    merged = delta_1 * math.sin((1 - share) * angle) + delta_2 * math.sin(share * angle)
    return (start + merged / math.sin(angle)).float()


def ties(
    base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], least: Sequence[float], scale: float
) -> Tensor:
    """``base`` plus the models' changes of it, without changes that contradict each other.

    Yadav et al. 2023, "TIES-Merging": of each model's change ``W_i - base`` the magnitudes from its ``least`` on are kept, see
    :func:`least_kept`; each place takes the sign that has the larger weighted sum; the weighted mean of the changes that have
    it, times ``scale`` (λ), is added to ``base``.
    """
    changes = []
    start = base.float()
    for tensor, weight, magnitude in zip(tensors, weights, least, strict=True):
        change = tensor.float() - start
        changes.append(change.where(change.abs() >= magnitude, 0.0) * weight)
    sign = torch.stack(changes).sum(0).sign()
    merged, total = torch.zeros_like(start), torch.zeros_like(start)
    for change, weight in zip(changes, weights, strict=True):
        agrees = (change.sign() == sign) & (change != 0)
        merged += change * agrees
        total += weight * agrees
    return start + scale * merged / total.where(total > 0, 1.0)  # 0 / 1 where no change is left


HALF = 16
"""Bits of a single-precision number that are counted at a time."""


def least_kept(changes: Callable[[], Iterable[Tensor]], density: float) -> float:
    """The least magnitude among the ``density`` · N largest of a model's N changes in all tensors together, at least one.

    TIES trims a model's whole task vector. Exact, with one tensor in memory at a time: ``changes`` is called twice, because
    magnitudes as bits, which have the order of the numbers, are counted by their upper half and then by their lower.
    """
    upper = _counts(changes(), lambda bits: bits >> HALF)
    keep = max(1, round(density * int(upper.sum())))
    bucket, above = _place(upper, keep)
    lower = _counts(changes(), lambda bits: bits[bits >> HALF == bucket] & 0xFFFF)
    last, _ = _place(lower, keep - above)
    return float(torch.tensor((bucket << HALF) + last, dtype=torch.int32).view(torch.float32))


def _counts(changes: Iterable[Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
    """Count of each value of a part of the magnitudes' bits. Returns [65536]."""
    counts = torch.zeros(1 << HALF, dtype=torch.int64)
    for change in changes:
        counts += torch.bincount(part(change.float().abs().flatten().view(torch.int32)), minlength=1 << HALF)
    return counts


def _place(counts: Tensor, keep: int) -> tuple[int, int]:
    """The value that the ``keep``-th largest has, and how many are larger than it."""
    from_top = counts.flip(0).cumsum(0)
    place = int((from_top >= keep).nonzero()[0])
    return len(counts) - 1 - place, int(from_top[place] - counts[len(counts) - 1 - place])
