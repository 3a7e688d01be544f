"""Corrections for another sampling policy, against those of TRL, verl and OpenRLHF on the same tensors."""

from __future__ import annotations

import openrlhf_parts as openrlhf
import pytest
import torch
import trl_parts as trl
import verl_parts as verl
from ragged import (
    ADVANTAGES_ST,
    LOGPS_ST,
    MASK_ST,
    OLD_ST,
    REWARD_S,
    ROLLOUT_ST,
    SEQUENCES,
    packed,
    same,
    same_with_gradient,
    sequences_of,
)
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from alignment_core.losses.mismatch import correction_weights
from alignment_core.losses.policy import policy_loss
from alignment_core.recipes.sections.rl import PolicyLossConfig

LOG_RATIO_ST = OLD_ST - ROLLOUT_ST


def ours(level: str, action: str, measure: str, low: float, high: float, mask_ST: Tensor = MASK_ST) -> Tensor:
    """The factor of each trained token's loss. [K]"""
    return correction_weights(
        packed(LOG_RATIO_ST, mask_ST),
        packed(ROLLOUT_ST, mask_ST),
        sequences_of(mask_ST),
        SEQUENCES,
        level=level,  # type: ignore[arg-type]
        action=action,  # type: ignore[arg-type]
        measure=measure,  # type: ignore[arg-type]
        low=low,
        high=high,
    )


def our_loss(weights_K: Tensor, mask_ST: Tensor = MASK_ST) -> object:
    def loss(x: Tensor) -> Tensor:
        logps_K = packed(x, mask_ST)
        losses_K = policy_loss(
            PolicyLossConfig(),
            logps_K - packed(OLD_ST, mask_ST),
            logps_K,
            packed(ADVANTAGES_ST, mask_ST),
            sequences_of(mask_ST),
            len(mask_ST),
        )
        return (weights_K * losses_K).mean()

    return loss


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("action", "verb", "low"), [("clip", "truncate", None), ("clip", "truncate", 0.75), ("mask", "mask", 0.75)]
)
def test_ratios_clipped_or_masked_by_token_or_sequence_are_trls(
    level: str, action: str, verb: str, low: float | None
) -> None:
    theirs = trl.scored(
        GRPOTrainer,
        REWARD_S,
        3,
        old_ST=OLD_ST,
        rollout_ST=ROLLOUT_ST,
        mask_ST=MASK_ST,
        mode=f"{level}_{verb}",
        bounds=(low, 1.4),
    )["importance_sampling_ratio"]
    mine_K = ours(level, action, "ratio", low or 0.0, 1.4)
    same(mine_K, packed(theirs.expand(MASK_ST.shape)))
    same_with_gradient(
        our_loss(mine_K),  # type: ignore[arg-type]
        lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "bnpo", weights_ST=theirs),
        LOGPS_ST,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("action", "low", "threshold"), [("clip", 0.0, 1.4), ("mask", 0.75, "0.75_1.4")])
def test_truncated_importance_sampling_and_icepop_are_verls(
    level: str, action: str, low: float, threshold: float | str
) -> None:
    theirs_ST, _ = verl.compute_rollout_correction_weights(LOG_RATIO_ST, MASK_ST.double(), level, threshold)
    mine_K = ours(level, action, "ratio", low, 1.4)
    same(mine_K, packed(theirs_ST))
    same_with_gradient(
        our_loss(mine_K),  # type: ignore[arg-type]
        lambda x: verl.policy_loss("vanilla", x, OLD_ST, ADVANTAGES_ST, MASK_ST, weights_ST=theirs_ST),
        LOGPS_ST,
    )


@pytest.mark.parametrize(
    ("level", "action", "measure", "low", "high"),
    [
        ("token", "clip", "ratio", 0.75, 1.4),
        ("token", "mask", "ratio", 0.75, 1.4),
        ("token", "mask", "kl", 0.0, 0.02),
        ("token", "mask", "tv", 0.0, 0.05),
        ("sequence", "mask", "kl", 0.0, 0.04),
        ("sequence", "mask", "tv", 0.0, 0.08),
    ],
)
def test_corrections_are_openrlhfs(level: str, action: str, measure: str, low: float, high: float) -> None:
    theirs = openrlhf_loss(level, action, measure, low, high)
    weights_K = ours(level, action, measure, low, high)
    same_with_gradient(our_loss(weights_K), lambda x: theirs(x, MASK_ST), LOGPS_ST)  # type: ignore[arg-type]
    changed = ~torch.isclose(weights_K, packed(LOG_RATIO_ST).exp())
    assert 0 < int(changed.sum()) < len(weights_K), "some are limited and some are not"


def test_openrlhf_judges_a_sequence_by_the_mean_of_its_log_ratios_and_we_verl_and_trl_by_their_sum() -> None:
    # the same of a completion of one token: its mean is its sum
    single_ST = torch.zeros_like(MASK_ST)
    single_ST[:, 0] = True
    same_with_gradient(
        our_loss(ours("sequence", "mask", "ratio", 0.6, 1.4, single_ST), single_ST),  # type: ignore[arg-type]
        lambda x: openrlhf_loss("sequence", "mask", "ratio", 0.6, 1.4)(x, single_ST),
        LOGPS_ST,
    )
    # of longer ones OpenRLHF keeps those whose geometric mean is inside, with the ratio of each token as weight
    sums_S, tokens_S = (LOG_RATIO_ST * MASK_ST).sum(1), MASK_ST.sum(1)
    kept_S = ((sums_S / tokens_S).exp() >= 0.9) & ((sums_S / tokens_S).exp() <= 1.2)
    weights_K = packed(LOG_RATIO_ST.exp() * kept_S[:, None])
    theirs = openrlhf_loss("sequence", "mask", "ratio", 0.9, 1.2)
    same_with_gradient(our_loss(weights_K), lambda x: theirs(x, MASK_ST), LOGPS_ST)  # type: ignore[arg-type]
    assert 0 < int(kept_S.sum()) < SEQUENCES


def openrlhf_loss(level: str, action: str, measure: str, low: float, high: float) -> object:
    loss = openrlhf.PolicyLoss(
        is_correction_level={"token": "token", "sequence": "seq"}[level],
        is_correction_mode=action,
        is_correction_gating={"kl": "binary_kl"}.get(measure, measure),
        is_correction_threshold=[low, high],
    )
    return lambda x, mask_ST: loss(x, OLD_ST, ADVANTAGES_ST, mask_ST, ROLLOUT_ST)[0]
