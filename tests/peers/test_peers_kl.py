"""Estimates of the KL and the coefficient that follows it, against OpenRLHF, verl and TRL on the same tensors."""

from __future__ import annotations

import openrlhf_parts as openrlhf
import pytest
import torch
import trl_parts as trl
import verl_parts as verl
from ragged import LOGPS_ST, MASK_ST, REFERENCE_ST, packed, same, same_with_gradient
from torch import Tensor

from alignment_core.losses.kl import KlEstimator, adapted_coefficient, kl_estimate, kl_with_unbiased_gradient

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_are_openrlhfs_and_verls(estimator: KlEstimator) -> None:
    def mine(x: Tensor) -> Tensor:
        return kl_estimate(packed(x), packed(REFERENCE_ST), estimator)

    same_with_gradient(
        mine,
        lambda x: packed(openrlhf.compute_approx_kl(x, REFERENCE_ST, kl_estimator=estimator)),
        LOGPS_ST,
    )
    same_with_gradient(mine, lambda x: packed(verl.core_algos.kl_penalty(x, REFERENCE_ST, estimator)), LOGPS_ST)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_unbiased_gradient_is_openrlhfs_and_verls_form_with_a_plus(estimator: KlEstimator) -> None:
    def mine(x: Tensor) -> Tensor:
        return kl_with_unbiased_gradient(packed(x), packed(REFERENCE_ST), estimator, torch.zeros_like(packed(x)))

    same_with_gradient(
        mine,
        lambda x: packed(openrlhf.compute_approx_kl(x, REFERENCE_ST, kl_estimator=estimator, unbiased_gradient=True)),
        LOGPS_ST,
    )
    same_with_gradient(mine, lambda x: packed(verl.core_algos.kl_penalty(x, REFERENCE_ST, f"{estimator}+")), LOGPS_ST)


def test_the_unbiased_gradient_is_weighed_by_the_ratio_once_the_policy_has_moved_as_openrlhfs() -> None:
    old_ST = LOGPS_ST - 0.3
    same_with_gradient(
        lambda x: kl_with_unbiased_gradient(packed(x), packed(REFERENCE_ST), "k3", packed(x - old_ST)),
        lambda x: packed(openrlhf.compute_approx_kl(x, REFERENCE_ST, old_ST, "k3", unbiased_gradient=True)),
        LOGPS_ST,
    )


def test_openrlhf_and_verl_bound_an_estimate_at_ten_nats_and_we_do_not() -> None:
    near, far = torch.tensor([0.0], dtype=torch.float64), torch.tensor([-3.0], dtype=torch.float64)
    assert float(kl_estimate(far, near, "k3")) == pytest.approx(16.0855369)  # e³ - 1 - 3
    for theirs in (
        openrlhf.compute_approx_kl(far, near, kl_estimator="k3"),
        verl.core_algos.kl_penalty(far, near, "k3"),
    ):
        same(kl_estimate(far, near, "k3").clamp(max=10), theirs)


def test_the_kl_in_the_loss_is_trls_which_has_k3_alone() -> None:
    advantages_ST = torch.zeros_like(LOGPS_ST)

    def mine(x: Tensor) -> Tensor:
        return 0.7 * kl_estimate(packed(x), packed(REFERENCE_ST), "k3").mean()

    same_with_gradient(
        mine,
        lambda x: trl.grpo_loss(x, LOGPS_ST, advantages_ST, MASK_ST, "bnpo", reference_ST=REFERENCE_ST, beta=0.7),
        LOGPS_ST,
    )


def test_the_adaptive_coefficient_goes_the_way_of_openrlhfs_and_verls() -> None:
    ours, theirs = (
        0.1,
        [openrlhf.AdaptiveKLController(0.1, 0.5, 1000), verl.core_algos.AdaptiveKLController(0.1, 0.5, 1000)],
    )
    for kl in (0.4, 0.9, 0.52, 0.0, 3.0):
        ours = adapted_coefficient(ours, kl, target=0.5, samples=64, horizon=1000)
        for controller in theirs:
            controller.update(kl, 64)
            assert controller.value == pytest.approx(ours, abs=1e-12)
