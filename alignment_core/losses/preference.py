"""Losses on preference pairs for a policy: DPO, its conservative form, and IPO."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Direct preference optimisation.

    ``L = -(1 - ε) log σ(β (r_w - r_l)) - ε log σ(-β (r_w - r_l))`` with ``r = log π(y|x) - log π_ref(y|x)`` summed over
    the completion's tokens. ε = 0: Rafailov et al. 2023, "Direct Preference Optimization", equation 7; ε > 0 is the
    conservative form of Mitchell 2023, "A note on DPO with noisy preferences".

    Args: log-ratios [P] in nats. Returns [P].
    """
    logits_P = beta * (log_ratio_chosen_P - log_ratio_rejected_P)
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)


def ipo_loss(mean_ratio_chosen_P: Tensor, mean_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """Identity preference optimisation: ``L = (r_w - r_l - 1 / (2 β))²``.

    Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences", equation 17. The
    log-ratios are means over the completion's tokens, as the authors advise and TRL does (OpenRLHF sums).

    Args: mean log-ratios [P] in nats per token. Returns [P].
    """
    return (mean_ratio_chosen_P - mean_ratio_rejected_P - 1 / (2 * beta)) ** 2
