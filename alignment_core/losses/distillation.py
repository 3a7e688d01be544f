"""Divergences between a teacher and a student over the tokens of each place.

Both are given as log-probabilities of the teacher's likeliest tokens. All other tokens are one more outcome, which has the rest
of the mass. So each divergence compares two complete distributions: it is never negative, and at most the one over all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_rest(logps_KC: Tensor) -> Tensor:
    """Append the log of the mass that the candidates leave: [K, C] → [K, C + 1]."""
    listed_K = torch.logsumexp(logps_KC, dim=-1).clamp(max=-1e-7)  # of all tokens, rounding may give more than 1
    # log(1 - mass) by expm1: it keeps its digits where the candidates have nearly all of the mass.
    return torch.cat([logps_KC, torch.log(-torch.expm1(listed_K))[:, None]], dim=1)


def kl(logps_KC: Tensor, others_KC: Tensor) -> Tensor:
    """``KL(p ‖ q)`` in nats of the distributions with these log-probabilities. [K, C] → [K]."""
    return (logps_KC.exp() * (logps_KC - others_KC)).sum(-1)


def forward_kl(teacher_KC: Tensor, student_KC: Tensor) -> Tensor:
    """``KL(teacher ‖ student)``, mode-covering: each token that the teacher may choose needs probability. Hinton et al. 2015,
    "Distilling the Knowledge in a Neural Network". [K, C] → [K]."""
    return kl(teacher_KC, student_KC)


def reverse_kl(teacher_KC: Tensor, student_KC: Tensor) -> Tensor:
    """``KL(student ‖ teacher)``, mode-seeking: tokens that the teacher would not choose are penalised. Gu et al. 2024,
    "MiniLLM: Knowledge Distillation of Large Language Models". [K, C] → [K]."""
    return kl(student_KC, teacher_KC)


def generalised_jsd(teacher_KC: Tensor, student_KC: Tensor, beta: float) -> Tensor:
    """``β KL(teacher ‖ m) + (1 - β) KL(student ‖ m)`` with ``m = β teacher + (1 - β) student``, 0 < β < 1.

    Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", equation 1.
    [K, C] → [K].
    """
    mixed_KC = torch.logaddexp(teacher_KC + math.log(beta), student_KC + math.log1p(-beta))
    return beta * kl(teacher_KC, mixed_KC) + (1 - beta) * kl(student_KC, mixed_KC)
