"""Losses on preference pairs for a reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | float = 0.0) -> Tensor:
    """``L = -log σ(s_w - s_l - m)``: Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback", equation 1; the margin m is that of Touvron et al. 2023, "Llama 2", equation 2.

    Args: scores [P], margin [P] or 0. Returns [P].
    """
    return -logsigmoid(chosen_P - rejected_P - margin_P)


def log_exp_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | float = 0.0) -> Tensor:
    """``L = log(1 + exp(s_l - s_w + m))``, computed as softplus's defining sum of exponentials.

    Equal to :func:`bradley_terry_loss` in exact arithmetic; kept because OpenRLHF has it as an option.
    Args: scores [P], margin [P] or 0. Returns [P].
    """
    difference_P = rejected_P - chosen_P + margin_P
    return torch.logaddexp(torch.zeros_like(difference_P), difference_P)


def centering_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """``L = (s_w + s_l)²``, which centres the scores at 0: Eisenstein et al. 2023, "Helping or Herding? Reward Model Ensembles
    Mitigate but do not Eliminate Reward Hacking", equation 2.

    Args: scores [P]. Returns [P].
    """
    return (chosen_P + rejected_P) ** 2
