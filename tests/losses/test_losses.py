"""Every loss against numbers worked out by hand; TRL as a second opinion where it offers the same loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from alignment_core.losses.logprobs import entropy, sum_by_sequence, token_logps
from alignment_core.losses.preference import dpo_loss, ipo_loss
from alignment_core.losses.reward import bradley_terry_loss, centering_loss, log_exp_loss
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.training.methods.reward_model import RewardModel


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_token_logps_is_the_log_of_the_softmax_at_the_label() -> None:
    # logits (0, ln 3): softmax = (1/4, 3/4)
    logits_KV = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    logps_K = token_logps(logits_KV, torch.tensor([0, 1]))
    assert logps_K.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])


def test_sum_by_sequence_adds_tokens_per_sequence_and_absent_sequences_are_zero() -> None:
    # tokens 1, 2 belong to sequence 0 and token 4 to sequence 2; sequence 1 has none
    sums_S = sum_by_sequence(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3)
    assert sums_S.tolist() == [3.0, 0.0, 4.0]


def test_dpo_at_equal_log_ratios_is_log_two() -> None:
    # β (r_w - r_l) = 0, so L = -log σ(0) = log 2
    assert dpo_loss(scalar(1.5), scalar(1.5), beta=0.1).item() == pytest.approx(math.log(2))


def test_dpo_by_hand() -> None:
    # β = 0.5, r_w = 1, r_l = -1: z = 0.5 · 2 = 1; L = -log σ(1) = log(1 + e^-1) = 0.313262
    assert dpo_loss(scalar(1.0), scalar(-1.0), beta=0.5).item() == pytest.approx(0.3132616875, abs=1e-9)


def test_conservative_dpo_by_hand() -> None:
    # z = 1 as above, ε = 0.1: L = 0.9 · 0.313262 + 0.1 · log(1 + e^1) = 0.281936 + 0.1 · 1.313262 = 0.413262
    assert dpo_loss(scalar(1.0), scalar(-1.0), 0.5, label_smoothing=0.1).item() == pytest.approx(0.4132616875, abs=1e-9)


def test_dpo_gradient_by_hand() -> None:
    # dL/dr_w = -β (1 - σ(z)); at z = 0 and β = 0.2 that is -0.1, and +0.1 for the rejected one
    chosen, rejected = scalar(0.0).requires_grad_(), scalar(0.0).requires_grad_()
    dpo_loss(chosen, rejected, beta=0.2).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.1, 0.1))


def test_ipo_by_hand() -> None:
    # mean log-ratios 0.3 and 0.1, β = 0.1: (0.2 - 1 / 0.2)² = (0.2 - 5)² = 23.04
    assert ipo_loss(scalar(0.3), scalar(0.1), beta=0.1).item() == pytest.approx(23.04)


def test_ipo_is_zero_where_the_gap_is_one_over_two_beta() -> None:
    # β = 2: the gap that IPO aims at is 0.25
    assert ipo_loss(scalar(0.5), scalar(0.25), beta=2.0).item() == pytest.approx(0.0)


def test_bradley_terry_by_hand() -> None:
    # s_w - s_l = 2: -log σ(2) = log(1 + e^-2) = 0.126928
    assert bradley_terry_loss(scalar(3.0), scalar(1.0)).item() == pytest.approx(0.1269280110, abs=1e-9)


def test_the_centering_of_rewards_by_hand() -> None:
    """Scores 3 and 1, and −2 and 0.5: the squares of 4 and −1.5."""
    chosen, rejected = torch.tensor([3.0, -2.0]), torch.tensor([1.0, 0.5])
    assert centering_loss(chosen, rejected).tolist() == [16.0, 2.25]


def test_a_reward_model_adds_the_mean_of_the_centering_times_its_coefficient() -> None:
    """TRL 1.16: ``loss += coefficient * torch.mean((rewards_chosen + rewards_rejected) ** 2)``; of the scores above 9.125."""
    sequence = TokenSequence(np.ones(3, np.int64), np.arange(3) > 0)
    batch = pack([Row(number, (sequence, sequence)) for number in range(2)], share_prefixes=False)
    scores = torch.tensor([3.0, 1.0, -2.0, 0.5])
    plain, _ = RewardModel().loss(scores, batch, None)
    centred, metrics = RewardModel(center_rewards_coefficient=0.01).loss(scores, batch, None)
    assert (centred - plain).item() / 2 == pytest.approx(0.09125, abs=1e-6)
    assert metrics["loss"].item() == centred.item()


def test_bradley_terry_with_margin_asks_for_a_larger_gap() -> None:
    # s_w - s_l - m = 2 - 1 = 1: log(1 + e^-1) = 0.313262
    assert bradley_terry_loss(scalar(3.0), scalar(1.0), scalar(1.0)).item() == pytest.approx(0.3132616875, abs=1e-9)


@pytest.mark.parametrize("gap", [-30.0, -1.0, 0.0, 2.0, 30.0, 800.0, -800.0])
def test_log_exp_equals_bradley_terry_and_stays_finite(gap: float) -> None:
    # log(1 + exp(-gap)) both ways; for a gap of -800 the naive form would overflow, the right answer is 800
    value = log_exp_loss(scalar(gap), scalar(0.0)).item()
    assert value == pytest.approx(bradley_terry_loss(scalar(gap), scalar(0.0)).item(), abs=1e-12)
    assert math.isfinite(value)


def test_entropy_is_that_of_the_softmax() -> None:
    # logits (0, ln 3): p = (1/4, 3/4), H = ¼ log 4 + ¾ log (4/3) = 0.5623351; equal logits: log 2
    entropies = entropy(torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]]))
    assert entropies.tolist() == pytest.approx([0.5623351, math.log(2)])
