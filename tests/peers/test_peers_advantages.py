"""Advantages of a step's rewards, by the rows of the table in docs/recipes/reinforcement-learning.md, against the peers'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import openrlhf_parts as openrlhf
import pytest
import torch
import trl_parts as trl
import verl_parts as verl
from ragged import (
    GROUP_S,
    LENGTHS,
    LONGEST,
    MASK_ST,
    OLD_ST,
    PADDED_ST,
    REFERENCE_ST,
    REWARD_S,
    SEQUENCES,
    draw,
    packed,
    same,
)
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from alignment_core.losses.kl import kl_estimate
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig, ShapingConfig
from alignment_core.rewards.aggregation import length_penalties
from alignment_core.rollout.advantages import add_advantages, baselined, group_deviation
from alignment_core.training.step_data import StepData

VALUES_ST = draw(50)
GROUP_SIZE = 3
INDEX_S = GROUP_S.numpy()


def ours(
    advantage: dict[str, Any],
    mask_ST: Tensor = MASK_ST,
    values_ST: Tensor = VALUES_ST,
    reward_S: Tensor = REWARD_S,
    kl: dict[str, Any] | None = None,
    wanted: str = "advantages",
) -> Tensor:
    """The advantages of a step's trained tokens. [K]"""
    data = StepData.of([[0]] * SEQUENCES, mask_ST.int().numpy(), mask_ST.numpy(), GROUP_S.tolist())
    columns = {"old_logps": OLD_ST, "reference_logps": REFERENCE_ST, "old_values": values_ST}
    data.numbers.update({name: packed(column, mask_ST).float().numpy() for name, column in columns.items()})
    config = KlConfig(**(kl or {}))
    add_advantages(data, reward_S.tolist(), AdvantageConfig(**advantage), config, config.coefficient)
    return torch.from_numpy(data.numbers[wanted])


def rewards_ST(mask_ST: Tensor = MASK_ST, reward_S: Tensor = REWARD_S) -> Tensor:
    """verl takes a reward for each token: the completion's reward is at its last token."""
    result_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
    result_ST[torch.arange(SEQUENCES), torch.tensor(LENGTHS) - 1] = reward_S
    return result_ST


def with_bessel(whitened_K: Tensor) -> Tensor:
    """verl divides by the standard deviation with n - 1, we and OpenRLHF by that with n."""
    return whitened_K * ((len(whitened_K) - 1) / len(whitened_K)) ** 0.5


def spread(values_S: Tensor) -> Tensor:
    """One number per completion → per trained token."""
    return packed(values_S[:, None].expand(MASK_ST.shape))


# --- PPO ---------------------------------------------------------------------------------------------------------


def test_gae_and_its_returns_are_openrlhfs_whitening_included() -> None:
    recipe = {"estimator": "gae", "whiten": "mean-and-deviation", "gamma": 0.97, "gae_lambda": 0.9}
    advantages_ST, returns_ST = openrlhf.advantages_and_returns(
        "gae", REWARD_S, PADDED_ST, GROUP_SIZE, values_ST=VALUES_ST, gamma=0.97, gae_lambda=0.9
    )
    same(ours(recipe, PADDED_ST), packed(advantages_ST, PADDED_ST))
    same(ours(recipe, PADDED_ST, wanted="returns"), packed(returns_ST, PADDED_ST))


def test_gae_and_its_returns_are_verls_which_steps_over_the_tokens_of_tools_as_we_do() -> None:
    recipe = {"estimator": "gae", "gamma": 0.97, "gae_lambda": 0.9}
    advantages_ST, returns_ST = verl.core_algos.compute_gae_advantage_return(
        rewards_ST(), VALUES_ST, MASK_ST.double(), 0.97, 0.9
    )
    same(ours(recipe), packed(returns_ST - VALUES_ST))
    same(ours(recipe, wanted="returns"), packed(returns_ST))
    # verl whitens GAE in any case; we leave it to the recipe
    same(with_bessel(ours({**recipe, "whiten": "mean-and-deviation"})), packed(advantages_ST))


def test_openrlhf_counts_a_tools_token_as_a_step_whose_value_is_nothing() -> None:
    recipe = {"estimator": "gae", "gamma": 0.97, "gae_lambda": 0.9}
    _, returns_ST = openrlhf.advantages_and_returns(
        "gae", REWARD_S, MASK_ST, GROUP_SIZE, values_ST=VALUES_ST, gamma=0.97, gae_lambda=0.9
    )
    gaps_as_steps_K = ours(recipe, PADDED_ST, VALUES_ST * MASK_ST, wanted="returns")
    same(gaps_as_steps_K[packed(MASK_ST, PADDED_ST)], packed(returns_ST))
    assert not torch.allclose(ours(recipe, wanted="returns"), packed(returns_ST).float())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_in_the_reward_is_openrlhfs_and_verls(estimator: str) -> None:
    recipe = {"estimator": "gae", "gamma": 0.97, "gae_lambda": 0.9}
    kl = {"place": "reward", "estimator": estimator, "coefficient": 0.3}
    mine = ours(recipe, PADDED_ST, kl=kl, wanted="returns")

    kl_ST = openrlhf.compute_approx_kl(OLD_ST, REFERENCE_ST, kl_estimator=estimator)
    _, returns_ST = openrlhf.advantages_and_returns(
        "gae",
        REWARD_S,
        PADDED_ST,
        GROUP_SIZE,
        values_ST=VALUES_ST,
        kl_ST=kl_ST,
        kl_coefficient=0.3,
        gamma=0.97,
        gae_lambda=0.9,
    )
    same(mine, packed(returns_ST, PADDED_ST))

    kl_ST = verl.core_algos.kl_penalty(OLD_ST, REFERENCE_ST, estimator)
    _, returns_ST = verl.core_algos.compute_gae_advantage_return(
        rewards_ST() - 0.3 * kl_ST * PADDED_ST, VALUES_ST, PADDED_ST.double(), 0.97, 0.9
    )
    same(mine, packed(returns_ST, PADDED_ST))


# --- REINFORCE++ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("whiten", "no_std_norm"), [("mean-and-deviation", False), ("mean", True)])
def test_reinforce_plus_plus_is_openrlhfs_reinforce(whiten: str, no_std_norm: bool) -> None:
    recipe = {"estimator": "returns", "whiten": whiten, "gamma": 0.97}
    kl_ST = openrlhf.compute_approx_kl(OLD_ST, REFERENCE_ST)
    advantages_ST, _ = openrlhf.advantages_and_returns(
        "reinforce",
        REWARD_S,
        PADDED_ST,
        GROUP_SIZE,
        kl_ST=kl_ST,
        kl_coefficient=0.3,
        gamma=0.97,
        no_std_norm=no_std_norm,
    )
    kl = {"place": "reward", "estimator": "k1", "coefficient": 0.3}
    same(ours(recipe, PADDED_ST, kl=kl), packed(advantages_ST, PADDED_ST))


def test_reinforce_plus_plus_is_verls_but_for_its_bessel_correction() -> None:
    advantages_ST, returns_ST = verl.core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards_ST(), MASK_ST.double(), SimpleNamespace(gamma=0.97)
    )
    same(ours({"estimator": "returns", "gamma": 0.97}), packed(returns_ST))
    whitened_K = ours({"estimator": "returns", "gamma": 0.97, "whiten": "mean-and-deviation"})
    same(with_bessel(whitened_K), packed(advantages_ST))


def test_reinforce_plus_plus_baseline_is_openrlhfs_and_but_for_bessels_correction_verls() -> None:
    mine_K = ours({"estimator": "group", "whiten": "mean-and-deviation"})
    advantages_ST, _ = openrlhf.advantages_and_returns("reinforce_baseline", REWARD_S, MASK_ST, GROUP_SIZE)
    same(mine_K, packed(advantages_ST))
    advantages_ST, _ = verl.core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards_ST(), MASK_ST.double(), INDEX_S
    )
    same(with_bessel(mine_K), packed(advantages_ST))


def test_flash_reinforce_is_openrlhfs() -> None:
    advantages_ST, _ = openrlhf.advantages_and_returns("flash_reinforce", REWARD_S, MASK_ST, GROUP_SIZE)
    same(ours({"estimator": "batch"}), packed(advantages_ST))


# --- groups --------------------------------------------------------------------------------------------------------


def test_rloo_is_the_same_in_all_peers() -> None:
    mine_K = ours({"estimator": "leave-one-out"})
    advantages_ST, _ = openrlhf.advantages_and_returns("rloo", REWARD_S, MASK_ST, GROUP_SIZE)
    same(mine_K, packed(advantages_ST))
    for theirs in (
        verl.core_algos.compute_rloo_outcome_advantage,
        verl.core_algos.compute_rloo_vectorized_outcome_advantage,
    ):
        same(mine_K, packed(theirs(rewards_ST(), MASK_ST.double(), INDEX_S)[0]))
    same(mine_K, spread(trl.scored(RLOOTrainer, REWARD_S, GROUP_SIZE)["advantages"]))


def test_dr_grpo_is_the_same_in_all_peers() -> None:
    mine_K = ours({"estimator": "group"})
    advantages_ST, _ = openrlhf.advantages_and_returns("dr_grpo", REWARD_S, MASK_ST, GROUP_SIZE)
    same(mine_K, packed(advantages_ST))
    advantages_ST, _ = verl.core_algos.compute_grpo_outcome_advantage(
        rewards_ST(), MASK_ST.double(), INDEX_S, norm_adv_by_std_in_grpo=False
    )
    same(mine_K, packed(advantages_ST))
    same(mine_K, spread(trl.scored(GRPOTrainer, REWARD_S, GROUP_SIZE, scale="none")["advantages"]))


def test_grpo_is_trls() -> None:
    mine_K = ours({"estimator": "group", "scale_rewards": "group"})
    same(mine_K, spread(trl.scored(GRPOTrainer, REWARD_S, GROUP_SIZE)["advantages"]))


def test_scaling_by_the_deviation_of_the_batch_is_trls() -> None:
    mine_K = ours({"estimator": "group", "scale_rewards": "batch"})
    same(mine_K, spread(trl.scored(GRPOTrainer, REWARD_S, GROUP_SIZE, scale="batch")["advantages"]))


def test_grpo_is_openrlhfs_and_verls_except_for_the_epsilon_of_the_deviation() -> None:
    # we and TRL add 1e-4, verl 1e-6, OpenRLHF 1e-9
    mine_K = ours({"estimator": "group", "scale_rewards": "group"})
    deviation_K = spread(group_deviation(REWARD_S, GROUP_S))
    advantages_ST, _ = verl.core_algos.compute_grpo_outcome_advantage(rewards_ST(), MASK_ST.double(), INDEX_S)
    same(mine_K * (deviation_K + 1e-4) / (deviation_K + 1e-6), packed(advantages_ST))
    advantages_ST, _ = openrlhf.advantages_and_returns("group_norm", REWARD_S, MASK_ST, GROUP_SIZE)
    same(mine_K * (deviation_K + 1e-4) / (deviation_K + 1e-9), packed(advantages_ST))


def test_a_group_of_equal_rewards_has_no_advantage_anywhere() -> None:
    equal_S = torch.full_like(REWARD_S, 0.7)
    nothing_K = torch.zeros(int(MASK_ST.sum()))
    same(ours({"estimator": "group", "scale_rewards": "group"}, reward_S=equal_S), nothing_K)
    same(spread(trl.scored(GRPOTrainer, equal_S, GROUP_SIZE)["advantages"]), nothing_K)
    same(
        packed(verl.core_algos.compute_grpo_outcome_advantage(rewards_ST(reward_S=equal_S), MASK_ST, INDEX_S)[0]),
        nothing_K,
    )
    same(packed(openrlhf.advantages_and_returns("group_norm", equal_S, MASK_ST, GROUP_SIZE)[0]), nothing_K)


def test_a_single_completion_has_zero_advantage_except_in_verls_unvectorised_rloo() -> None:
    alone_S = torch.arange(SEQUENCES)
    mine_S = baselined(REWARD_S, alone_S, "leave-one-out")
    same(mine_S, torch.zeros(SEQUENCES))
    same(mine_S, trl.scored(RLOOTrainer, REWARD_S, 1)["advantages"])
    ones_S1 = torch.ones(SEQUENCES, 1, dtype=torch.float64)
    vectorised_S1, _ = verl.core_algos.compute_rloo_vectorized_outcome_advantage(
        REWARD_S[:, None], ones_S1, alone_S.numpy()
    )
    same(mine_S, vectorised_S1[:, 0])
    reward_S1, _ = verl.core_algos.compute_rloo_outcome_advantage(REWARD_S[:, None], ones_S1, alone_S.numpy())
    same(REWARD_S, reward_S1[:, 0])


def test_trls_and_verls_baselines_count_the_kl_in_the_reward_and_ours_as_openrlhfs_the_reward_alone() -> None:
    kl_ST = kl_estimate(OLD_ST, REFERENCE_ST, "k1") * MASK_ST
    mine_K = ours({"estimator": "group"}, kl={"place": "reward", "estimator": "k1", "coefficient": 0.3})
    advantages_ST, _ = openrlhf.advantages_and_returns(
        "dr_grpo", REWARD_S, MASK_ST, GROUP_SIZE, kl_ST=kl_ST, kl_coefficient=0.3
    )
    same(mine_K, packed(advantages_ST))
    penalised_S = REWARD_S - 0.3 * kl_ST.sum(1)
    advantages_ST, _ = verl.core_algos.compute_grpo_outcome_advantage(
        rewards_ST() - 0.3 * kl_ST, MASK_ST.double(), INDEX_S, norm_adv_by_std_in_grpo=False
    )
    same(spread(baselined(penalised_S, GROUP_S, "group")), packed(advantages_ST))
    penalised_S = REWARD_S - 0.3 * (kl_estimate(OLD_ST, REFERENCE_ST, "k1") * PADDED_ST).sum(1)
    options = {"old_ST": OLD_ST, "reference_ST": REFERENCE_ST, "mask_ST": PADDED_ST, "beta": 0.3}
    found_S = trl.scored(RLOOTrainer, REWARD_S, GROUP_SIZE, **options)["advantages"]  # type: ignore[arg-type]
    same(baselined(penalised_S, GROUP_S, "leave-one-out"), found_S)


# --- length --------------------------------------------------------------------------------------------------------


def test_the_penalty_of_overlong_completions_is_the_same_in_all_peers() -> None:
    lengths_S = np.array([3, 12, 13, 15, 19, 20])
    config = ShapingConfig(overlong_buffer=8, overlong_penalty=1.0)
    mine_S = length_penalties(lengths_S, np.zeros(6, bool), 20, config)
    trls = trl.get_soft_overlong_punishment(20, 8)([[0] * length for length in lengths_S])
    assert trls == pytest.approx(mine_S.tolist())

    experience = SimpleNamespace(response_length=torch.from_numpy(lengths_S), rewards=torch.zeros(6))
    openrlhf.apply_overlong_penalty([experience], 20, 8, 0.5)
    assert experience.rewards.tolist() == pytest.approx((0.5 * mine_S).tolist())

    assert verl.overlong_rewards(lengths_S, 20, 8, 0.5) == pytest.approx((0.5 * mine_S).tolist())


def test_the_batch_has_as_many_completions_in_each_group() -> None:
    assert torch.bincount(GROUP_S).tolist() == [GROUP_SIZE] * (SEQUENCES // GROUP_SIZE)
    assert PADDED_ST.shape == (SEQUENCES, LONGEST)
