"""Accuracies of equal numbers: a difference within rounding is a tie and counts one half."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignment_core.evaluation.statistics import win_rate_per_prompt
from alignment_core.losses.ties import logp_rounding, logps_rounding, positive
from alignment_core.models.microbatch import TokenSequence
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.kto import Kto
from alignment_core.training.methods.process_reward_model import ProcessRewardModel
from alignment_core.training.methods.reward_model import RewardModel

PAIRS, TOKENS = 8, 100


def pack(output_ST: Tensor, **more: Any) -> Any:
    """A micro-batch of sequences with equally many targets; only the fields that a loss reads."""
    sequences, tokens = output_ST.shape
    rows = [SimpleNamespace(margin=0.0) for _ in range(sequences // 2)]
    sequence_K = torch.arange(sequences).repeat_interleave(tokens)
    return SimpleNamespace(sequence_K=sequence_K, sequences=sequences, **{"rows": rows, **more})


def summed_in_another_order(logps_ST: Tensor) -> Tensor:
    """The same sums in fp32 from the last token to the first, one after the other."""
    total_S = torch.zeros(len(logps_ST))
    for logps_S in logps_ST.flip(1).unbind(1):
        total_S = total_S + logps_S
    return total_S


@pytest.fixture
def logps_ST() -> Tensor:
    return -3 * torch.rand(2 * PAIRS, TOKENS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_policy_that_is_its_reference_up_to_rounding_has_an_accuracy_of_one_half(
    logps_ST: Tensor, loss_type: Any
) -> None:
    """By hand: 8 pairs that are equal but for rounding are 8 ties, and 8 · 0.5 = 4."""
    reference_S = summed_in_another_order(logps_ST)
    noise_S = logps_ST.flatten(1).sum(1) - reference_S
    assert (noise_S != 0).any(), "the order of a sum in fp32 changes it"
    _, metrics = Dpo(DpoLossConfig(loss_type=loss_type)).loss(logps_ST.flatten(), pack(logps_ST), reference_S)
    assert metrics["accuracy"] == 4.0


def test_a_real_margin_is_no_tie(logps_ST: Tensor) -> None:
    """By hand: in fp32 the first pair's margin of 0.01 nats counts 1 and the second one's of -0.01 counts 0, beside 6 ties:
    1 + 0 + 6 · 0.5 = 4. With the second one's sign turned it is 1 + 1 + 6 · 0.5 = 5. In bf16 the rounding of two sums of 100
    tokens is 2 · 0.03 · √100 = 0.6 nats, so that 0.01 ties and 1 does not."""
    reference_S = logps_ST.sum(1)
    moved_S = torch.tensor([0.01, 0.0, 0.0, 0.01, *[0.0] * (2 * PAIRS - 4)])
    both_S = moved_S * torch.tensor([1, 1, 1, -1] * 4)
    for bf16, moved, right in (
        (False, moved_S, 4.0),
        (False, both_S, 5.0),
        (True, both_S, 4.0),
        (True, 100 * both_S, 5.0),
    ):
        _, metrics = Dpo(DpoLossConfig(), bf16).loss(logps_ST.flatten(), pack(logps_ST), reference_S - moved)
        assert metrics["accuracy"] == right


def test_kto_rows_at_the_baseline_are_ties(logps_ST: Tensor) -> None:
    """Sixteen rows, all at z₀ = 0 but for rounding: 16 · 0.5 = 8."""
    rows = [SimpleNamespace(margin=float(number % 2)) for number in range(2 * PAIRS)]
    method = Kto(KtoLossConfig(), counts=(PAIRS, PAIRS))
    _, metrics = method.loss(logps_ST.flatten(), pack(logps_ST, rows=rows), summed_in_another_order(logps_ST))
    assert metrics["accuracy"] == 8.0


def test_equal_scores_of_a_reward_model_are_ties() -> None:
    """Scores of 2 that differ in their last place tie, 2 against 1 wins, 1 against 2 loses, and two scores of 0, as a head of
    zeros gives them, tie: 0.5 + 1 + 0 + 0.5 = 2."""
    scores_S = torch.tensor([2.0, 2.0 * (1 + 2**-23), 2.0, 1.0, 1.0, 2.0, 0.0, 0.0])
    _, metrics = RewardModel().loss(scores_S, pack(scores_S[:, None]), None)
    assert metrics["accuracy"] == 2.0


def test_equal_verdict_tokens_of_a_process_reward_model_are_ties() -> None:
    """Steps with log-odds of 0 (label 1), 1 (label 1), 1 (label 0) and -1e-7 (label 0): 0.5 + 1 + 0 + 0.5 = 2."""
    ids, labels = np.arange(5), np.array([1.0, 1.0, 0.0, 0.0], np.float32)
    sequence = TokenSequence(ids, ids > 0, np.zeros((4, 2), np.int64), np.stack([labels, 1 - labels], axis=1))
    good_K = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    bad_K = torch.tensor([-1.0, -2.0, -2.0, -1.0 + 1.2e-7])
    output = torch.stack([torch.zeros(4), good_K, bad_K], dim=1)
    rows = [SimpleNamespace(sequences=(sequence,))]
    _, metrics = ProcessRewardModel((1, 2)).loss(output, SimpleNamespace(rows=rows), None)  # type: ignore[arg-type]
    assert metrics["accuracy"] == 2.0


def test_equal_completions_are_a_tie_between_policies() -> None:
    """A reward model scores a text 1.2345678 in one batch and 1.2345679 in another; neither wins."""
    mine, theirs = ([{"prompt": 0, "reward": value}] for value in (1.2345678, 1.2345679))
    assert win_rate_per_prompt(mine, theirs, "reward", 0.0) == [0.5]
    assert win_rate_per_prompt(mine, [{"prompt": 0, "reward": 1.2346}], "reward", 0.0) == [0.0]


def test_rounding_grows_with_the_tokens_and_the_epsilon_of_the_dtype() -> None:
    """By hand: 4 · 2⁻⁷ + 64 · 2⁻²³ = 0.0312576 nats a token in bf16 (machine epsilon 2⁻⁷), 68 · 2⁻²³ = 8.1e-6 in fp32; for a
    sum of -64 nats over 16 tokens √16 times as much, and 64 · 2⁻²³ of the sum."""
    assert logp_rounding(True) == pytest.approx(0.0312576, abs=1e-7)
    assert logp_rounding(False) == pytest.approx(68 / 2**23)
    found_S = logps_rounding(torch.tensor([-64.0]), torch.tensor([16.0]), False)
    assert float(found_S) == pytest.approx((4 * 68 + 64) / 2**23)
    assert positive(torch.tensor([0.2, -0.2, 0.1, -0.1]), 0.1).tolist() == [1.0, 0.0, 0.5, 0.5]
