"""Policy, value and entropy losses: the same numbers and gradients as the peers' own functions on the same tensors."""

from __future__ import annotations

import openrlhf_parts as openrlhf
import pytest
import torch
import trl_parts as trl
import verl_parts as verl
from ragged import (
    ADVANTAGE_S,
    ADVANTAGES_ST,
    LENGTHS,
    LOGPS_ST,
    LONGEST,
    MASK_ST,
    OLD_ST,
    SEQUENCES,
    draw,
    packed,
    same,
    same_with_gradient,
    sequences_of,
)
from torch import Tensor

from alignment_core.losses.logprobs import entropy, token_logps
from alignment_core.losses.policy import (
    aggregation_normaliser,
    aggregation_weights,
    policy_loss,
    policy_objective,
    top_entropy,
    value_loss,
)
from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig

TOKENS = int(MASK_ST.sum())
BUDGET = 11  # the longest completion that was allowed; none came to it
AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "fixed-length"]
TRL_LOSS = {"token-mean": "bnpo", "sequence-mean-token-mean": "grpo", "fixed-length": "dr_grpo"}
VERL_AGGREGATION = {
    "token-mean": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "fixed-length": "seq-mean-token-sum-norm",
}
PER_SEQUENCE_ST = ADVANTAGE_S[:, None].expand(MASK_ST.shape)


def reduced(losses_K: Tensor, aggregation: str) -> Tensor:
    """A rank's sum over its micro-batch, divided by the normaliser of the whole batch."""
    weights_K = aggregation_weights(sequences_of(), SEQUENCES, aggregation)  # type: ignore[arg-type]
    return (weights_K * losses_K).sum() / aggregation_normaliser(TOKENS, SEQUENCES, aggregation, BUDGET)  # type: ignore[arg-type]


def ours(logps_ST: Tensor, advantages_ST: Tensor = ADVANTAGES_ST, **fields: object) -> Tensor:
    config = PolicyLossConfig(**fields)  # type: ignore[arg-type]
    logps_K = packed(logps_ST)
    losses_K = policy_loss(
        config, logps_K - packed(OLD_ST), logps_K, packed(advantages_ST), sequences_of(MASK_ST), SEQUENCES
    )
    return reduced(losses_K, config.aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clipped_ratio_with_two_bounds_is_trls(aggregation: str) -> None:
    same_with_gradient(
        lambda x: ours(x, epsilon=0.1, epsilon_high=0.3, aggregation=aggregation),
        lambda x: trl.grpo_loss(
            x, OLD_ST, ADVANTAGES_ST, MASK_ST, TRL_LOSS[aggregation], clip=(0.1, 0.3), longest=BUDGET
        ),
        LOGPS_ST,
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clipped_ratio_with_two_bounds_is_verls(aggregation: str) -> None:
    same_with_gradient(
        lambda x: ours(x, epsilon=0.1, epsilon_high=0.3, aggregation=aggregation),
        lambda x: verl.policy_loss(
            "vanilla",
            x,
            OLD_ST,
            ADVANTAGES_ST,
            MASK_ST,
            VERL_AGGREGATION[aggregation],
            (0.1, 0.3),
            loss_scale_factor=BUDGET,
        ),
        LOGPS_ST,
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:2])
def test_clipped_ratio_with_two_bounds_is_openrlhfs_which_has_no_fixed_length(aggregation: str) -> None:
    theirs = openrlhf.PolicyLoss(0.1, 0.3, token_level_loss=aggregation == "token-mean")
    same_with_gradient(
        lambda x: ours(x, epsilon=0.1, epsilon_high=0.3, aggregation=aggregation),
        lambda x: theirs(x, OLD_ST, ADVANTAGES_ST, MASK_ST)[0],
        LOGPS_ST,
    )


def test_the_dual_clip_is_openrlhfs_and_verls() -> None:
    far_ST = OLD_ST + draw(20, scale=2.0)
    theirs = openrlhf.PolicyLoss(dual_clip=3.0)
    same_with_gradient(lambda x: ours(x, delta=3.0), lambda x: theirs(x, OLD_ST, ADVANTAGES_ST, MASK_ST)[0], far_ST)
    same_with_gradient(
        lambda x: ours(x, delta=3.0),
        lambda x: verl.policy_loss("vanilla", x, OLD_ST, ADVANTAGES_ST, MASK_ST, dual_clip=3.0),
        far_ST,
    )
    assert not torch.isclose(ours(far_ST), ours(far_ST, delta=3.0)), "the second clip is felt here"


def test_trls_delta_above_the_upper_bound_is_the_dual_clip() -> None:
    far_ST = OLD_ST + draw(20, scale=2.0)
    same_with_gradient(
        lambda x: ours(x, delta=3.0),
        lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "bnpo", delta=3.0),
        far_ST,
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_is_verls_with_advantages_of_each_token_too(aggregation: str) -> None:
    same_with_gradient(
        lambda x: ours(x, loss_type="gspo", epsilon=0.05, epsilon_high=0.1, aggregation=aggregation),
        lambda x: verl.policy_loss(
            "gspo",
            x,
            OLD_ST,
            ADVANTAGES_ST,
            MASK_ST,
            VERL_AGGREGATION[aggregation],
            (0.05, 0.1),
            loss_scale_factor=BUDGET,
        ),
        LOGPS_ST,
    )


def test_gspo_is_trls_and_openrlhfs_for_one_advantage_per_sequence_and_the_mean_over_sequences() -> None:
    # theirs is the ratio of the paper's equation 7, ours and verl's its equation 14 (GSPO-token): the two have the same
    # gradient where a sequence has one advantage. OpenRLHF takes the mean over sequences in any setting.
    def mine(x: Tensor) -> Tensor:
        return ours(
            x,
            PER_SEQUENCE_ST,
            loss_type="gspo",
            epsilon=0.05,
            epsilon_high=0.1,
            aggregation="sequence-mean-token-mean",
        )

    same_with_gradient(
        mine,
        lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGE_S, MASK_ST, "grpo", clip=(0.05, 0.1), level="sequence"),
        LOGPS_ST,
    )
    theirs = openrlhf.PolicyLoss(0.05, 0.1, policy_loss_type="gspo")
    same_with_gradient(mine, lambda x: theirs(x, OLD_ST, PER_SEQUENCE_ST, MASK_ST)[0], LOGPS_ST)


def test_cispo_is_verls() -> None:
    same_with_gradient(
        lambda x: ours(x, loss_type="cispo", epsilon=0.2, epsilon_high=1.3),
        lambda x: verl.policy_loss("cispo", x, OLD_ST, ADVANTAGES_ST, MASK_ST, clip=(0.2, 0.3)),
        LOGPS_ST,
    )


def test_cispo_is_trls_with_epsilon_high_as_the_bound() -> None:
    # epsilon 1, the default, leaves the ratio free below
    same_with_gradient(
        lambda x: ours(x, loss_type="cispo", epsilon_high=1.3),
        lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "cispo", clip=(0.0, 1.3)),
        LOGPS_ST,
    )


def test_sapo_is_trls_and_verls_which_both_take_the_mean_over_sequences() -> None:
    def mine(x: Tensor) -> Tensor:
        return ours(x, loss_type="sapo", sapo_temperatures=(1.0, 1.05), aggregation="sequence-mean-token-mean")

    same_with_gradient(mine, lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "sapo"), LOGPS_ST)
    same_with_gradient(mine, lambda x: verl.policy_loss("sapo", x, OLD_ST, ADVANTAGES_ST, MASK_ST), LOGPS_ST)


def test_trls_rloo_loss_is_ours_over_fixed_length_1_for_an_unchanged_policy() -> None:
    # its ratio is that of the whole sequence, unnormalised: from the second step on a batch it is another loss
    config = PolicyLossConfig()

    def mine(x: Tensor) -> Tensor:
        logps_K, advantages_K = packed(x), packed(PER_SEQUENCE_ST)
        losses_K = policy_loss(
            config, logps_K - packed(LOGPS_ST), logps_K, advantages_K, sequences_of(MASK_ST), SEQUENCES
        )
        return losses_K.sum() / aggregation_normaliser(TOKENS, SEQUENCES, "fixed-length", 1)

    def gradient(function: object) -> Tensor:
        leaf = LOGPS_ST.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0]  # type: ignore[operator]

    same(gradient(mine), gradient(lambda x: trl.rloo_loss(x, LOGPS_ST, ADVANTAGE_S, MASK_ST)))


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_is_openrlhfs_and_verls(clip: float | None) -> None:
    values_ST, old_ST, returns_ST = draw(30), draw(31), draw(32)

    def mine(x: Tensor) -> Tensor:
        return reduced(value_loss(packed(x), packed(old_ST), packed(returns_ST), clip), "token-mean")

    theirs = openrlhf.ValueLoss(clip)
    same_with_gradient(mine, lambda x: theirs(x, old_ST, returns_ST, MASK_ST), values_ST)
    same_with_gradient(
        mine,
        lambda x: verl.core_algos.compute_value_loss(x, returns_ST, old_ST, MASK_ST.double(), clip or 1e9)[0],
        values_ST,
    )


def test_micro_batches_of_uneven_length_add_up_to_the_batch_as_openrlhfs_and_verls_do() -> None:
    halves = [slice(0, 2), slice(2, SEQUENCES)]

    def of_openrlhf(x: Tensor) -> Tensor:
        items = list(openrlhf.iter_grad_accum_global_norm(halves, None, 2, lambda half: MASK_ST[half]))
        losses = [
            openrlhf.PolicyLoss()(x[half], OLD_ST[half], ADVANTAGES_ST[half], MASK_ST[half], **totals)[0]
            for half, totals in items
        ]
        return sum(losses) / len(halves)  # as DeepSpeed divides by the steps of accumulation

    def of_verl(x: Tensor) -> Tensor:
        return sum(
            verl.policy_loss(
                "vanilla",
                x[half],
                OLD_ST[half],
                ADVANTAGES_ST[half],
                MASK_ST[half],
                batch_num_tokens=TOKENS,
                dp_size=1,
            )
            for half in halves
        )  # type: ignore[return-value]

    same_with_gradient(ours, of_openrlhf, LOGPS_ST)
    same_with_gradient(ours, of_verl, LOGPS_ST)


def test_trls_own_normaliser_of_the_whole_batch_is_its_type_dapo() -> None:
    # its other types normalise within the micro-batch: they agree if the batch is a single micro-batch, as above
    same_with_gradient(ours, lambda x: trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "dapo"), LOGPS_ST)


def test_the_entropy_bonus_is_trls_under_the_token_mean() -> None:
    logits_STV = draw(40, SEQUENCES, LONGEST, 7)
    labels_ST = torch.zeros(MASK_ST.shape, dtype=torch.long)

    def mine(x: Tensor) -> Tensor:
        logits_KV = x[MASK_ST]
        logps_K = token_logps(logits_KV, packed(labels_ST))
        losses_K = policy_loss(
            PolicyLossConfig(),
            logps_K - packed(OLD_ST),
            logps_K,
            packed(ADVANTAGES_ST),
            sequences_of(MASK_ST),
            SEQUENCES,
        )
        return reduced(losses_K - 0.01 * entropy(logits_KV), "token-mean")

    def theirs(x: Tensor) -> Tensor:
        logps_ST = trl.selective_log_softmax(x, labels_ST)
        entropy_ST = trl.entropy_from_logits(x)
        return trl.grpo_loss(
            logps_ST, OLD_ST, ADVANTAGES_ST, MASK_ST, "bnpo", entropy_ST=entropy_ST, entropy_bonus=0.01
        )

    same_with_gradient(mine, theirs, logits_STV)


@pytest.mark.parametrize("quantile", [0.01, 0.2, 0.8])
def test_tokens_of_high_entropy_are_trls_of_a_single_micro_batch(quantile: float) -> None:
    entropy_ST = draw(42).abs().float().double()
    advantages = {"advantages": packed(ADVANTAGES_ST), "rollout_logps": packed(OLD_ST), "old_logps": packed(OLD_ST)}
    selected_K = torch.from_numpy(top_entropy(packed(entropy_ST).float().numpy(), quantile))
    section = RlConfig.model_validate({"prompts": "none.jsonl", "rewards": [{"verifier": "math"}]})

    def mine(x: Tensor) -> Tensor:
        numbers = {**advantages, "top_entropy": selected_K}
        loss, _ = policy_objective(section, 0.0, packed(x), numbers, sequences_of(MASK_ST), SEQUENCES)
        return loss / TOKENS

    def theirs(x: Tensor) -> Tensor:
        return trl.grpo_loss(x, OLD_ST, ADVANTAGES_ST, MASK_ST, "bnpo", entropy_ST=entropy_ST, quantile=quantile)

    same_with_gradient(mine, theirs, LOGPS_ST)


def test_log_probabilities_and_entropy_of_logits_are_the_same_in_all_peers() -> None:
    logits_KV, labels_K = draw(41, 12, 9, scale=3.0), torch.arange(12) % 9
    for theirs in (
        trl.selective_log_softmax,
        openrlhf.log_probs_from_logits,
        verl.torch_functional.logprobs_from_logits_naive,
        verl.torch_functional.logprobs_from_logits_v2,
    ):
        same_with_gradient(lambda x: token_logps(x, labels_K), lambda x, f=theirs: f(x, labels_K), logits_KV)
    with torch.compiler.set_stance("force_eager"):  # OpenRLHF compiles its entropy
        for theirs in (
            trl.entropy_from_logits,
            openrlhf.compute_entropy,
            verl.torch_functional.entropy_from_logits,
        ):
            same_with_gradient(entropy, theirs, logits_KV)


def test_the_batch_is_ragged_and_has_gaps() -> None:
    assert len(set(LENGTHS)) > 3
    assert sum(LENGTHS) - TOKENS == 3
