"""The loss of a process reward model."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def step_loss(log_odds_K: Tensor, label_K: Tensor) -> Tensor:
    """``L = -y log p - (1 - y) log(1 - p)`` of each step, in nats, where p is the probability of the good verdict token among
    the two.

    Lightman et al. 2023, "Let's Verify Step by Step"; the verdict as the next token, and soft labels y, as in Wang et al. 2024,
    "Math-Shepherd", equation 2. Args: ``log p / (1 - p)`` [K]; labels in [0, 1] [K]. Returns [K].
    """
    return binary_cross_entropy_with_logits(log_odds_K, label_K, reduction="none")
