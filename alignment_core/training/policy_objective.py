"""The objectives of a policy and its critic on the trained tokens of a pack, from the loss terms that the recipe asks for.

Suffixes name axes as in :mod:`alignment_core.losses`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from alignment_core.losses.kl import kl_estimate, kl_with_unbiased_gradient
from alignment_core.losses.logprobs import ratio
from alignment_core.losses.mismatch import correction_weights
from alignment_core.losses.policy import (
    aggregation_weights,
    cispo_loss,
    clipped_ratio_loss,
    sapo_loss,
    sequence_log_ratio,
    value_loss,
)
from alignment_core.models.microbatch import MicroBatch
from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig


def policy_objective(
    section: RlConfig, kl_coefficient: float, output: Tensor, numbers: Mapping[str, Tensor], micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over tokens of policy loss, KL and entropy bonus, and sums of metrics.

    Args: ``output`` the policy's log-probabilities [K] in nats, or these and its entropies [2, K]; ``numbers`` by name, [K]
    each: ``advantages``, ``rollout_logps``, and if there are any ``old_logps`` and ``reference_logps``.
    """
    config, kl, correction = section.loss, section.kl, section.mismatch
    logps_K, entropy_K = output if output.dim() == 2 else (output, None)
    rollout_K = numbers["rollout_logps"]
    old_K = numbers["old_logps"] if "old_logps" in numbers else logps_K.detach()
    log_ratio_K = logps_K - old_K
    loss_K = policy_loss(config, log_ratio_K, logps_K, numbers["advantages"], micro)
    if correction.correction != "none":
        loss_K = loss_K * correction_weights(
            old_K - rollout_K,
            rollout_K,
            micro.sequence_K,
            micro.sequences,
            level=correction.level,
            action=correction.correction,
            measure=correction.measure,
            low=correction.low,
            high=correction.high,
        )
    sums = {
        "ratio": ratio(log_ratio_K).sum(),
        "clipped": ((log_ratio_K.exp() > 1 + config.clip_high) | (log_ratio_K.exp() < 1 - config.clip_low)).sum(),
        "entropy_estimate": -logps_K.sum(),
        "mismatch": kl_estimate(rollout_K, old_K, "k3").sum(),
        "trained_tokens": logps_K.new_tensor(float(len(logps_K))),
    }
    if "reference_logps" in numbers:
        reference_K = numbers["reference_logps"]
        sums["kl"] = kl_estimate(logps_K.detach(), reference_K, kl.estimator).sum()
        if kl.place == "loss":
            if kl.unbiased_gradient:
                kl_K = kl_with_unbiased_gradient(logps_K, reference_K, kl.estimator, log_ratio_K)
            else:
                kl_K = kl_estimate(logps_K, reference_K, kl.estimator)
            loss_K = loss_K + kl_coefficient * kl_K
    if entropy_K is not None:
        sums["entropy"] = entropy_K.sum()
        loss_K = loss_K - config.entropy_bonus * entropy_K
    return _weighted(loss_K, section, sums, micro)


def value_objective(
    section: RlConfig, values_K: Tensor, numbers: Mapping[str, Tensor], micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over tokens of the critic's loss, and sums of metrics. ``numbers`` are ``old_values`` and ``returns``,
    [K] each."""
    assert section.critic is not None
    returns_K = numbers["returns"]
    loss_K = value_loss(values_K.float(), numbers["old_values"], returns_K, section.critic.clip)
    sums = {
        "error": (values_K.float() - returns_K).abs().sum(),
        "trained_tokens": values_K.new_tensor(float(len(values_K))),
    }
    return _weighted(loss_K, section, sums, micro)


def _weighted(
    loss_K: Tensor, section: RlConfig, sums: dict[str, Tensor], micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    weights_K = aggregation_weights(micro.sequence_K, micro.sequences, section.loss.aggregation)
    loss = (weights_K * loss_K).sum()
    return loss, {name: value.detach() for name, value in {**sums, "loss": loss}.items()}


def policy_loss(
    config: PolicyLossConfig, log_ratio_K: Tensor, logps_K: Tensor, advantages_K: Tensor, micro: MicroBatch
) -> Tensor:
    """The policy loss of each trained token. [K] each."""
    low, high = config.clip_low, config.clip_high
    if config.loss_type == "cispo":
        return cispo_loss(log_ratio_K, logps_K, advantages_K, low, high)
    if config.loss_type == "sapo":
        return sapo_loss(log_ratio_K, advantages_K, *config.sapo_temperatures)
    if config.loss_type == "gspo":
        log_ratio_K = sequence_log_ratio(log_ratio_K, micro.sequence_K, micro.sequences)
    return clipped_ratio_loss(log_ratio_K, advantages_K, low, high, config.dual_clip)
