"""The objectives of a policy and its critic on the trained tokens of a pack, and the losses per token that they are made of.

``log_ratio_K`` is always log π(a|s) - log π_old(a|s), in nats; the gradient flows through it. Losses return [K], to be
weighted by :func:`aggregation_weights` and summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from alignment_core.losses.kl import kl_estimate, kl_with_unbiased_gradient
from alignment_core.losses.logprobs import ratio, sum_by_sequence
from alignment_core.losses.mismatch import correction_weights

if TYPE_CHECKING:
    from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "fixed-length"]


def policy_objective(
    section: RlConfig,
    kl_coefficient: float,
    output: Tensor,
    numbers: Mapping[str, Tensor],
    sequence_K: Tensor,
    count: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over tokens of policy loss, KL and entropy bonus, and sums of metrics. A KL in the reward is in the
    advantages, and measured where these are computed: of the policy that sampled, not of those that the updates make of it.

    Args: ``output`` the policy's log-probabilities [K] in nats, or these and its entropies [2, K]; ``numbers`` by name, [K]
    each: ``advantages``, ``rollout_logps``, and if there are any ``old_logps``, ``reference_logps`` and ``top_entropy``, by
    which the policy loss alone is multiplied; ``sequence_K`` [K] the
    sequences, ``count`` of them, that the tokens belong to.
    """
    config = section.loss
    kl = section.kl
    correction = section.importance_sampling_correction
    logps_K, entropy_K = output if output.dim() == 2 else (output, None)
    rollout_K = numbers["rollout_logps"]
    # Without old log-probabilities this is the batch's first update: the ratio is 1, and its gradient that of log π.
    old_K = numbers["old_logps"] if "old_logps" in numbers else logps_K.detach()
    log_ratio_K = logps_K - old_K
    loss_K = policy_loss(config, log_ratio_K, logps_K, numbers["advantages"], sequence_K, count)
    if "top_entropy" in numbers:
        loss_K = loss_K * numbers["top_entropy"]
    if correction.mode != "none":
        loss_K = loss_K * correction_weights(
            old_K - rollout_K,
            rollout_K,
            sequence_K,
            count,
            level=correction.level,
            action=correction.mode,
            measure=correction.measure,
            low=correction.low,
            high=correction.high,
        )
    sums = {
        "ratio": ratio(log_ratio_K).sum(),
        "entropy_estimate": -logps_K.sum(),
        "mismatch": kl_estimate(rollout_K, old_K, "k3").sum(),
        "trained_tokens": logps_K.new_tensor(float(len(logps_K))),
    }
    if config.loss_type != "sapo":  # which has a gate instead of bounds
        sums["clipped"] = clipped_tokens(config, log_ratio_K, sequence_K, count)
    if "reference_logps" in numbers and kl.place == "loss":
        reference_K = numbers["reference_logps"]
        if kl.unbiased_gradient:
            kl_K = kl_with_unbiased_gradient(logps_K, reference_K, kl.estimator, log_ratio_K)
        else:
            kl_K = kl_estimate(logps_K, reference_K, kl.estimator)
        sums["kl"] = kl_K.sum()
        loss_K = loss_K + kl_coefficient * kl_K
    if entropy_K is not None:
        sums["entropy"] = entropy_K.sum()
        loss_K = loss_K - config.entropy_coef * entropy_K
    return _weighted(loss_K, section, sums, sequence_K, count)


def value_objective(
    section: RlConfig, values_K: Tensor, numbers: Mapping[str, Tensor], sequence_K: Tensor, count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over tokens of the critic's loss, and sums of metrics. ``numbers`` are ``old_values`` and ``returns``,
    [K] each."""
    assert section.critic is not None
    returns_K = numbers["returns"]
    loss_K = value_loss(values_K.float(), numbers["old_values"], returns_K, section.critic.value_clip)
    sums = {
        "error": (values_K.float() - returns_K).abs().sum(),
        "trained_tokens": values_K.new_tensor(float(len(values_K))),
    }
    return _weighted(loss_K, section, sums, sequence_K, count)


def _weighted(
    loss_K: Tensor, section: RlConfig, sums: dict[str, Tensor], sequence_K: Tensor, count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    weights_K = aggregation_weights(sequence_K, count, section.loss.aggregation)
    loss = (weights_K * loss_K).sum()
    return loss, {name: value.detach() for name, value in {**sums, "loss": loss}.items()}


def policy_loss(
    config: PolicyLossConfig,
    log_ratio_K: Tensor,
    logps_K: Tensor,
    advantages_K: Tensor,
    sequence_K: Tensor,
    count: int,
) -> Tensor:
    """The policy loss of each trained token. [K] each."""
    low, high = config.bounds
    if config.loss_type == "cispo":
        return cispo_loss(log_ratio_K, logps_K, advantages_K, low, high)
    if config.loss_type == "sapo":
        return sapo_loss(log_ratio_K, advantages_K, *config.sapo_temperatures)
    if config.loss_type == "gspo":
        log_ratio_K = sequence_log_ratio(log_ratio_K, sequence_K, count)
    return clipped_ratio_loss(log_ratio_K, advantages_K, low, high, config.delta)


def clipped_tokens(config: PolicyLossConfig, log_ratio_K: Tensor, sequence_K: Tensor, count: int) -> Tensor:
    """The number of tokens whose ratio, or with GSPO that of their sequence, is outside the clip bounds.

    Args: ``log_ratio_K`` and ``sequence_K`` [K]; ``count`` sequences. Returns a scalar.
    """
    if config.loss_type == "gspo":
        log_ratio_K = sequence_log_ratio(log_ratio_K, sequence_K, count)
    ratio_K = log_ratio_K.exp()
    low, high = config.bounds
    return ((ratio_K > high) | (ratio_K < low)).sum()


def clipped_ratio_loss(
    log_ratio_K: Tensor, advantages_K: Tensor, low: float, high: float, delta: float | None = None
) -> Tensor:
    """``L = -min(r A, clip(r, low, high) A)``, with ``low`` 1 - ε and ``high`` 1 + ε.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; two bounds: Yu et al. 2025, "DAPO".
    With ``delta`` δ, where A < 0: ``-max(min(…), δ A)``: Ye et al. 2020, "Mastering Complex Control in
    MOBA Games with Deep Reinforcement Learning".

    Args: log-ratios and advantages [K]. Returns [K].
    """
    ratio_K = ratio(log_ratio_K)
    clipped_K = ratio_K.clamp(low, high)
    objective_K = torch.minimum(ratio_K * advantages_K, clipped_K * advantages_K)
    if delta is not None:
        floor_K = torch.maximum(objective_K, delta * advantages_K)
        objective_K = torch.where(advantages_K < 0, floor_K, objective_K)
    return -objective_K


def sequence_log_ratio(log_ratio_K: Tensor, sequence_K: Tensor, count: int) -> Tensor:
    """The log of a sequence's length-normalised ratio at each of its tokens, with the gradient of the token's own.

    ``s = exp(mean over the sequence of log r)`` and ``s_t = sg[s] · π_t / sg[π_t]``: Zheng et al. 2025, "Group Sequence
    Policy Optimization" (GSPO-token). To be given to :func:`clipped_ratio_loss` as log-ratio.

    Args: ``log_ratio_K`` and ``sequence_K`` [K]; ``count`` sequences. Returns [K].
    """
    sums_S = sum_by_sequence(log_ratio_K.detach(), sequence_K, count)
    tokens_S = sum_by_sequence(torch.ones_like(log_ratio_K), sequence_K, count).clamp(min=1)
    return (sums_S / tokens_S)[sequence_K] + log_ratio_K - log_ratio_K.detach()


def cispo_loss(log_ratio_K: Tensor, logps_K: Tensor, advantages_K: Tensor, low: float, high: float) -> Tensor:
    """``L = -sg[clip(r, low, high)] A log π``: no token loses its gradient.

    MiniMax 2025, "MiniMax-M1". A ``low`` of 0 leaves the ratio free below.

    Args: log-ratios, log-probabilities with gradient, and advantages [K]. Returns [K].
    """
    weight_K = ratio(log_ratio_K).clamp(low, high).detach()
    return -weight_K * advantages_K * logps_K


def sapo_loss(
    log_ratio_K: Tensor, advantages_K: Tensor, temperature_positive: float, temperature_negative: float
) -> Tensor:
    """``L = -(4 / τ) σ(τ (r - 1)) A`` with one τ for A > 0 and another for the rest: a gate instead of a clip.

    Gao et al. 2025, "Soft Adaptive Policy Optimization". At r = 1 the gradient is that of r A.

    Args: log-ratios and advantages [K]. Returns [K].
    """
    positive = torch.full_like(advantages_K, temperature_positive)
    tau_K = torch.where(advantages_K > 0, positive, torch.full_like(advantages_K, temperature_negative))
    return -4 / tau_K * torch.sigmoid(tau_K * (ratio(log_ratio_K) - 1)) * advantages_K


def value_loss(values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, clip: float | None) -> Tensor:
    """``L = ½ max((V - R)², (clip(V, V_old ± ε) - R)²)``, or without the second term where ``clip`` is none.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"; the clip is that
    of OpenAI's baselines, described by Huang et al. 2022, "The 37 Implementation Details of PPO".

    Args: values with gradient, values before the update, and returns [K]. Returns [K].
    """
    squares_K = (values_K - returns_K) ** 2
    if clip is not None:
        near_K = torch.clamp(values_K, old_values_K - clip, old_values_K + clip)
        squares_K = torch.maximum(squares_K, (near_K - returns_K) ** 2)
    return 0.5 * squares_K


def top_entropy(entropy_K: np.ndarray, quantile: float) -> np.ndarray:
    """1 for the tokens of a step's batch whose entropies are in its highest ``quantile``, 0 for others: Wang et al. 2025,
    "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning". [K] → [K] float32."""
    if not len(entropy_K):
        return entropy_K
    return (entropy_K >= np.quantile(entropy_K, 1 - quantile)).astype(np.float32)


def aggregation_weights(sequence_K: Tensor, count: int, aggregation: Aggregation) -> Tensor:
    """The weight of each token in the sum over a batch, which is then divided by :func:`aggregation_normaliser`.

    Args: ``sequence_K`` [K]: the sequences, ``count`` of them, that the tokens belong to. Returns [K].
    """
    ones_K = torch.ones(len(sequence_K), device=sequence_K.device)
    if aggregation != "sequence-mean-token-mean":
        return ones_K
    return 1 / sum_by_sequence(ones_K, sequence_K, count)[sequence_K]


def aggregation_normaliser(tokens: int, sequences: int, aggregation: Aggregation, length: int) -> float:
    """The divisor of the weighted sum over a batch of so many trained tokens and sequences.

    ``token-mean``: Yu et al. 2025, "DAPO". ``sequence-mean-token-mean``: Shao et al. 2024, "DeepSeekMath",
    equation 3. ``fixed-length``: every sequence counts as ``length`` tokens, so that tokens of long ones weigh no less: Liu
    et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO).
    """
    # At least 1: the loss of a batch without trained tokens is 0 instead of NaN.
    if aggregation == "token-mean":
        return max(1.0, float(tokens))
    return max(1.0, float(sequences) * (length if aggregation == "fixed-length" else 1))
