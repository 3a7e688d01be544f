"""One seeded batch, padded for the peers and packed for us, and the criterion of agreement."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

TOLERANCE = 1e-6
LENGTHS = (5, 1, 3, 8, 4, 2)
GROUP_S = torch.tensor([0, 0, 0, 1, 1, 1])
SEQUENCES, LONGEST = len(LENGTHS), max(LENGTHS)
PADDED_ST = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
"""Completions of uneven length: every token is the policy's own."""
MASK_ST = PADDED_ST.clone()
MASK_ST[0, 2] = MASK_ST[3, 1] = MASK_ST[3, 4] = False
"""The same with a tool's tokens in between, which are not trained on."""


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers, [S, T] by default, that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*(shape or (SEQUENCES, LONGEST)), generator=generator, dtype=torch.float64)


LOGPS_ST = -draw(1).abs()
OLD_ST = LOGPS_ST + draw(2, scale=0.4)
REFERENCE_ST = LOGPS_ST + draw(3, scale=0.4)
ROLLOUT_ST = (OLD_ST + draw(4, scale=0.4)).clamp(max=-1e-3)
ADVANTAGES_ST = draw(5)
ADVANTAGE_S = draw(6, SEQUENCES)
REWARD_S = draw(7, SEQUENCES)


def packed(values_ST: Tensor, mask_ST: Tensor = MASK_ST) -> Tensor:
    """[S, T] → [K]: the trained tokens, one row after another."""
    return values_ST[mask_ST]


def sequences_of(mask_ST: Tensor = MASK_ST) -> Tensor:
    """Which sequence a packed token belongs to. [K]"""
    return torch.arange(len(mask_ST)).repeat_interleave(mask_ST.sum(1))


def micro_batch(mask_ST: Tensor = MASK_ST) -> SimpleNamespace:
    """The fields of our micro-batch that losses read."""
    return SimpleNamespace(sequence_K=sequences_of(mask_ST), sequences=len(mask_ST))


def same(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def same_with_gradient(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], at: Tensor, tolerance: float = TOLERANCE
) -> None:
    """Two functions of one tensor have the same value there, and the same gradient."""
    results = []
    for function in (ours, theirs):
        leaf = at.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        results.append((value.detach(), gradient))
    same(results[0][0], results[1][0], tolerance)
    same(results[0][1], results[1][1], tolerance)
    assert results[0][1].abs().sum() > 0, "a gradient of nothing would agree with anything"
