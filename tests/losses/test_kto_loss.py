"""KTO's loss and its baseline, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from alignment_core.losses.kto import kl_baseline, kto_loss

SIGNS = torch.tensor([1.0, 1.0, -1.0, -1.0])


def test_the_loss_is_one_minus_the_sigmoid_of_the_distance_to_the_baseline_on_the_right_side() -> None:
    # β = 0.5, z₀ = 1: desirable r = 3: 1 - σ(0.5 · 2) = 1 / (1 + e); r = -1: 1 - σ(-1) = e / (1 + e);
    # undesirable r = 3: 1 - σ(0.5 · (1 - 3)) = e / (1 + e); r = 1: 1 - σ(0) = ½
    losses = kto_loss(torch.tensor([3.0, -1.0, 3.0, 1.0]), SIGNS, torch.tensor(1.0), beta=0.5)
    e = math.e
    assert losses.tolist() == pytest.approx([1 / (1 + e), e / (1 + e), e / (1 + e), 0.5])


def test_kto_without_a_baseline_is_the_unpaired_form_of_apo_zero() -> None:
    # desirable: 1 - σ(β r); undesirable: σ(β r). β r = ln 3: σ = ¾
    ratio = torch.tensor([math.log(3.0), -math.log(3.0), math.log(3.0), -math.log(3.0)])
    assert kto_loss(ratio, SIGNS, 0.0, beta=1.0).tolist() == pytest.approx([0.25, 0.75, 0.75, 0.25])


def test_the_gradient_saturates_far_from_the_baseline_on_either_side() -> None:
    # dL/dr = -s β σ(x) (1 - σ(x)) with x = s β (r - z₀): -¼ β at the baseline
    ratio = torch.tensor([2.0, 102.0, -98.0, 2.0], requires_grad=True)
    kto_loss(ratio, SIGNS, 2.0, beta=0.4).sum().backward()
    assert ratio.grad.tolist() == pytest.approx([-0.1, 0.0, 0.0, 0.1], abs=1e-8)


def test_the_baseline_is_the_mean_log_ratio_where_that_is_positive_and_has_no_gradient() -> None:
    total = torch.tensor(6.0, requires_grad=True)
    assert kl_baseline(total, 4).item() == 1.5
    assert kl_baseline(-total, 4).item() == 0.0, "a KL divergence is never negative"
    assert not kl_baseline(total, 4).requires_grad
    assert math.isnan(kl_baseline(torch.tensor(math.nan), 4)), "NaN is not hidden"
