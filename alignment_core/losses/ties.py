"""Comparisons of numbers that differ by rounding alone: a tie counts one half.

A policy before its first step is its own reference, so that all of DPO's log-ratios are 0 up to rounding: the same sequence in
another micro-batch is multiplied in another order. The share of positive differences would be noise; with ties it is 0.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCUMULATION = 64 * torch.finfo(torch.float32).eps
"""Rounding of a sum of products over a hidden size, which is in fp32 whatever the dtype of the weights."""


def logp_rounding(bf16: bool) -> float:
    """Rounding of a token's log-probability, in nats: logits of magnitude 4 to 8 have half a unit in the last place of two to
    four epsilons of their dtype, and accumulation in fp32 adds to that. fp32: 8e-6, bf16: 0.03.

    Between two layouts of the same rows, SmolLM2-135M has root mean squares of 1e-6 to 5e-6 (fp32) and 0.01 to 0.05 (bf16).
    """
    return 4 * torch.finfo(torch.bfloat16 if bf16 else torch.float32).eps + ACCUMULATION


def logps_rounding(logps_S: Tensor, tokens_S: Tensor, bf16: bool) -> Tensor:
    """Rounding of a sequence's log-probability in nats: independent errors of its tokens, which grow as √T, and the rounding of
    the sum itself, which is in fp32.

    Args: summed log-probabilities [S] and the number of tokens in each sum [S]. Returns [S].
    """
    return logp_rounding(bf16) * tokens_S.sqrt() + torch.finfo(torch.float32).eps * logps_S.detach().abs()


def score_rounding(scores_S: Tensor, bf16: bool) -> Tensor:
    """Rounding of a score, which is a sum of products of hidden states. [S] → [S]."""
    return (torch.finfo(torch.bfloat16 if bf16 else torch.float32).eps + ACCUMULATION) * scores_S.detach().abs()


def positive(difference: Tensor, rounding: Tensor | float) -> Tensor:
    """1 for a positive difference, 0 for a negative one, and one half for a tie, which is within the rounding."""
    return torch.where(difference.abs() <= rounding, 0.5, (difference > 0).to(difference.dtype))
