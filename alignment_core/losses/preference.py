"""Losses on preference pairs for a policy: DPO and its relatives.

Throughout, ``r = log π(y|x) - log π_ref(y|x)`` is the log-ratio of a completion, and δ is that of the chosen one (w) less that
of the rejected one (l). A loss takes two tensors [P] in nats, of chosen and rejected completions, and returns [P].
:data:`LOSSES` has the number of a completion that each loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from alignment_core.recipes import DpoLossConfig


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


def hinge_loss(log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = max(0, 1 - β δ)``: Zhao et al. 2023, "SLiC-HF: Sequence Likelihood Calibration with Human Feedback", on log-ratios
    as in Liu et al. 2023, "Statistical Rejection Sampling Improves Preference Optimization"."""
    return torch.relu(1 - beta * (log_ratio_chosen_P - log_ratio_rejected_P))


def robust_loss(
    log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """``L = (-(1 - ε) log σ(β δ) + ε log σ(-β δ)) / (1 - 2 ε)``, whose mean over labels of which the share ε is flipped is
    DPO's loss of the true ones: Chowdhury et al. 2024, "Provably Robust DPO"."""
    logits_P = beta * (log_ratio_chosen_P - log_ratio_rejected_P)
    kept_P, flipped_P = (1 - label_smoothing) * logsigmoid(logits_P), label_smoothing * logsigmoid(-logits_P)
    return (flipped_P - kept_P) / (1 - 2 * label_smoothing)


def exo_pair_loss(
    log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """``L = KL(q ‖ p)`` of ``q = (σ(β δ), σ(-β δ))`` to ``p = (1 - ε, ε)``: Ji et al. 2024, "Towards Efficient Exact
    Optimization of Language Model Alignment", equation 16."""
    logits_P = beta * (log_ratio_chosen_P - log_ratio_rejected_P)
    target = torch.tensor([1 - label_smoothing, label_smoothing], dtype=torch.float64).log().tolist()
    terms = (
        torch.sigmoid(z_P) * (logsigmoid(z_P) - log) for z_P, log in zip((logits_P, -logits_P), target, strict=True)
    )
    return sum(terms, torch.zeros_like(logits_P))


def nca_pair_loss(log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = -log σ(β r_w) - ½ log σ(-β r_w) - ½ log σ(-β r_l)``: Chen et al. 2024, "Noise Contrastive Alignment of Language
    Models with Explicit Rewards"."""
    chosen_P, rejected_P = beta * log_ratio_chosen_P, beta * log_ratio_rejected_P
    return -logsigmoid(chosen_P) - 0.5 * logsigmoid(-chosen_P) - 0.5 * logsigmoid(-rejected_P)


def sppo_hard_loss(log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = (r_w - 1 / (2 β))² + (r_l + 1 / (2 β))²``: Wu et al. 2024, "Self-Play Preference Optimization", with a probability
    of 1 that the chosen completion wins."""
    return (log_ratio_chosen_P - 0.5 / beta) ** 2 + (log_ratio_rejected_P + 0.5 / beta) ** 2


def apo_zero_loss(log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = 1 - σ(β r_w) + σ(β r_l)``: the chosen completions become likelier. For those that are better than the policy's own.
    D'Oosterlinck et al. 2024, "Anchored Preference Optimization", equation 7."""
    return 1 - torch.sigmoid(beta * log_ratio_chosen_P) + torch.sigmoid(beta * log_ratio_rejected_P)


def apo_down_loss(log_ratio_chosen_P: Tensor, log_ratio_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = σ(β r_w) + 1 - σ(β δ)``: both become less likely, the rejected ones more so. For chosen completions that are worse
    than the policy's own. D'Oosterlinck et al. 2024, equation 8."""
    margin_P = log_ratio_chosen_P - log_ratio_rejected_P
    return torch.sigmoid(beta * log_ratio_chosen_P) + 1 - torch.sigmoid(beta * margin_P)


def simpo_loss(
    mean_logp_chosen_P: Tensor, mean_logp_rejected_P: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0
) -> Tensor:
    """DPO's loss of ``β (log p_w - log p_l) - γ`` with means over the tokens in place of log-ratios: Meng et al. 2024, "SimPO:
    Simple Preference Optimization with a Reference-Free Reward", equation 6."""
    logits_P = beta * (mean_logp_chosen_P - mean_logp_rejected_P) - gamma
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)


def orpo_loss(mean_logp_chosen_P: Tensor, mean_logp_rejected_P: Tensor, beta: float) -> Tensor:
    """``L = -β log σ(log odds_w - log odds_l)`` with ``odds = p / (1 - p)`` and log p the mean over the tokens: the second term
    of Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", equation 6."""
    # log(1 - p) by expm1, which keeps its digits near p = 1; the clamp keeps it finite where p rounds to 1.
    log_odds_P = (
        mean_P - torch.log(-torch.expm1(mean_P.clamp(max=-1e-7)))
        for mean_P in (mean_logp_chosen_P, mean_logp_rejected_P)
    )
    chosen_P, rejected_P = log_odds_P
    return -beta * logsigmoid(chosen_P - rejected_P)


MOST_EXPONENT = 80.0
"""Bound of exponents, as in TRL: e^80 is a number in fp32, and completions of 1,000 tokens have log-ratios beyond it."""


def f_derivative(log_ratio_S: Tensor, divergence: str, alpha: float) -> Tensor:
    """``f'(t)`` of the ratio t = π(y|x) / π_ref(y|x), which takes the place of DPO's log t: Wang et al. 2024, "Beyond Reverse
    KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints", table 1.

    ``forward_kl``: 1 - 1 / t. ``js_divergence``: log(2 t / (1 + t)). ``alpha_divergence``: (t^(α - 1) - 1) / (α - 1), whose α
    is 1 - α in the paper. Args: log-ratios [S] in nats. Returns [S].
    """
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio_S)
    power = {"forward_kl": -1.0, "alpha_divergence": alpha - 1}.get(divergence)
    return log_ratio_S if power is None else torch.expm1((power * log_ratio_S).clamp(max=MOST_EXPONENT)) / power


def tail_weights(sequence_K: Tensor, tokens_S: Tensor, alpha: float) -> Tensor:
    """1 for as many first tokens of a completion as the shorter one of its pair has, and α for the rest: Liu et al. 2024,
    "Length Desensitization in Direct Preference Optimization" (LD-DPO).

    Args: ``sequence_K`` [K]: the sequences of the tokens, one after the other; ``tokens_S`` [S]: their lengths, in the order
    chosen, rejected, chosen, …. Returns [K].
    """
    place_K = torch.arange(len(sequence_K), device=sequence_K.device) - (tokens_S.cumsum(0) - tokens_S)[sequence_K]
    shared_S = tokens_S.view(-1, 2).amin(1).repeat_interleave(2)
    return torch.where(place_K < shared_S[sequence_K], 1.0, alpha)


LEAST_BETA = 1e-3
"""Lower bound of β in β-DPO, as in its authors' code."""


def dynamic_beta(beta: float, margin: float, alpha: float, threshold: float) -> float:
    """``β' = β (1 + α (m - m₀))``, at least 0.001, of a batch whose implicit rewards have the mean margin m: Wu et al. 2024,
    "β-DPO: Direct Preference Optimization with Dynamic β". In the paper the threshold m₀ follows the margins of earlier
    batches; here it is fixed, so that a step depends on its own batch alone."""
    return max(beta * (1 + alpha * (margin - threshold)), LEAST_BETA)


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss, and the number of a completion that it takes."""

    of: Callable[[Tensor, Tensor, DpoLossConfig], Tensor]
    means: bool = False
    """Means over the completion's tokens in place of sums."""
    reference: bool = True
    """Log-ratios to the reference in place of log-probabilities."""


LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(lambda w, r, c: dpo_loss(w, r, c.beta, c.label_smoothing)),
    "ipo": PreferenceLoss(lambda w, r, c: ipo_loss(w, r, c.beta), means=True),
    "hinge": PreferenceLoss(lambda w, r, c: hinge_loss(w, r, c.beta)),
    "robust": PreferenceLoss(lambda w, r, c: robust_loss(w, r, c.beta, c.label_smoothing)),
    "exo_pair": PreferenceLoss(lambda w, r, c: exo_pair_loss(w, r, c.beta, c.label_smoothing)),
    "nca_pair": PreferenceLoss(lambda w, r, c: nca_pair_loss(w, r, c.beta)),
    "sppo_hard": PreferenceLoss(lambda w, r, c: sppo_hard_loss(w, r, c.beta)),
    "apo_zero": PreferenceLoss(lambda w, r, c: apo_zero_loss(w, r, c.beta)),
    "apo_down": PreferenceLoss(lambda w, r, c: apo_down_loss(w, r, c.beta)),
    "sigmoid_norm": PreferenceLoss(lambda w, r, c: dpo_loss(w, r, c.beta), means=True),
    "simpo": PreferenceLoss(
        lambda w, r, c: simpo_loss(w, r, c.beta, c.target_margin, c.label_smoothing), means=True, reference=False
    ),
    "cpo": PreferenceLoss(lambda w, r, c: dpo_loss(w, r, c.beta, c.label_smoothing), reference=False),
    "orpo": PreferenceLoss(lambda w, r, c: orpo_loss(w, r, c.beta), means=True, reference=False),
}
"""By the name in recipes (TRL's, where it has the loss). ``sigmoid_norm`` is DPO of means over tokens; ``cpo`` is DPO's loss of
log-probabilities, beside the chosen completions' likelihood: Xu et al. 2024, "Contrastive Preference Optimization"."""
