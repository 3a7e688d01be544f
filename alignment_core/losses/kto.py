"""The loss on single completions that are labelled desirable or undesirable: KTO."""

from __future__ import annotations

from torch import Tensor, sigmoid


def kto_loss(log_ratio_B: Tensor, sign_B: Tensor, baseline: Tensor | float, beta: float) -> Tensor:
    """Kahneman–Tversky optimisation, before each row's weight.

    ``L = 1 - σ(s β (r - z₀))`` with ``r = log π(y|x) - log π_ref(y|x)`` summed over the completion's tokens, and the sign s
    = 1 of a desirable completion, -1 of an undesirable one. Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect
    Theoretic Optimization", section 4. With a baseline z₀ of 0 it is the unpaired form of APO-zero (D'Oosterlinck et al.
    2024, "Anchored Preference Optimization and Contrastive Revisions").

    Args: log-ratios [B] and the baseline in nats, signs [B]. Returns [B], each in (0, 1).
    """
    return sigmoid(-beta * sign_B * (log_ratio_B - baseline))


def kl_baseline(sum_of_log_ratios: Tensor, count: float) -> Tensor:
    """``z₀ = max(0, mean of log π(y'|x) - log π_ref(y'|x))`` over prompts x with completions y' to other prompts.

    An estimate of the KL divergence of the policy from its reference, in nats; without a gradient. The same paper, section 4.
    """
    return (sum_of_log_ratios.detach() / max(count, 1)).clamp(min=0)
