"""Log-probabilities of given tokens, per token and per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Bound of log-ratios before ``exp``, so that one token cannot make the loss of a batch infinite or NaN. e^20 is 5e8."""


def token_logps(logits_KV: Tensor, labels_K: Tensor) -> Tensor:
    """Natural-log probability of each label, in fp32.

    Args: ``logits_KV`` [K, V] any float type; ``labels_K`` [K] token ids. Returns [K].
    """
    # In bf16, log-probabilities between -4 and -8 would be multiples of 1/32.
    return -torch.nn.functional.cross_entropy(logits_KV.float(), labels_K, reduction="none")


def candidate_logps(logits_KV: Tensor, labels_K: Tensor, candidates_KC: Tensor) -> Tensor:
    """Natural-log probabilities of each label and of the candidates in its place, in fp32. Returns [K, 1 + C], labels first."""
    wanted_KC = torch.cat([labels_K[:, None], candidates_KC], dim=1)
    return torch.log_softmax(logits_KV.float(), dim=-1).gather(1, wanted_KC)


def top_logps(logits_KV: Tensor, count: int) -> Tensor:
    """The ``count`` most likely tokens of each place and their natural-log probabilities, in fp32.

    Returns [2, K, C]: ids (exact up to 2²⁴), then log-probabilities, the most likely first; C is ``count``, or V if that is
    less.
    """
    logps_KV = torch.log_softmax(logits_KV.float(), dim=-1)
    logps_KC, ids_KC = logps_KV.topk(min(count, logps_KV.shape[-1]), dim=-1)
    return torch.stack([ids_KC.float(), logps_KC])


def entropy(logits_KV: Tensor) -> Tensor:
    """Entropy in nats of each row's softmax, in fp32. Args: logits [K, V]. Returns [K]."""
    logps_KV = torch.log_softmax(logits_KV.float(), dim=-1)
    return -(logps_KV.exp() * logps_KV).sum(-1)


def sum_by_sequence(values_K: Tensor, sequence_K: Tensor, count: int) -> Tensor:
    """Sum of ``values_K`` [K] over each sequence; ``sequence_K`` [K] holds numbers in [0, count). Returns [count]."""
    return torch.zeros(count, dtype=values_K.dtype, device=values_K.device).index_add(0, sequence_K, values_K)


def ratio(log_ratio_K: Tensor) -> Tensor:
    """The exponential of log-ratios in nats, which are clamped to ±``LARGEST_LOG_RATIO``. [K] → [K]."""
    return log_ratio_K.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
