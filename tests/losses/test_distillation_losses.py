"""Divergences between a teacher and a student, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from alignment_core.losses.distillation import forward_kl, generalised_jsd, reverse_kl, with_rest
from alignment_core.losses.logprobs import candidate_logps, top_logps


def logs(*shares: float) -> torch.Tensor:
    return torch.tensor([shares], dtype=torch.float64).log()


def test_the_rest_is_the_probability_outside_the_candidates() -> None:
    assert with_rest(logs(0.5, 0.2)).exp()[0].tolist() == pytest.approx([0.5, 0.2, 0.3])
    whole = with_rest(logs(0.5, 0.5))
    assert torch.isfinite(whole).all()
    assert whole.exp()[0, -1] < 1e-6


def test_kl_by_hand_in_both_directions() -> None:
    teacher, student = logs(0.5, 0.25, 0.25), logs(0.25, 0.25, 0.5)
    # 0.5 log 2 + 0 + 0.25 log ½ = 0.25 log 2, and the same the other way round
    assert forward_kl(teacher, student).item() == pytest.approx(0.25 * math.log(2))
    assert reverse_kl(teacher, student).item() == pytest.approx(0.25 * math.log(2))
    # 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1), and 0.9 log(0.9 / 0.5) + 0.1 log(0.1 / 0.5)
    half, sure = logs(0.5, 0.5), logs(0.9, 0.1)
    assert forward_kl(half, sure).item() == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5))
    assert reverse_kl(half, sure).item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))


def test_generalised_jensen_shannon_by_hand() -> None:
    # m = 0.25 (1, 0+) + 0.75 (0.5, 0.5) for β = 0.25; take teacher (0.9, 0.1) and student (0.5, 0.5): m = (0.6, 0.4)
    divergence = generalised_jsd(logs(0.9, 0.1), logs(0.5, 0.5), beta=0.25).item()
    teacher = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    student = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert divergence == pytest.approx(0.25 * teacher + 0.75 * student)


def test_a_divergence_of_equals_is_zero_and_of_candidates_at_most_that_of_all_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    teacher_KV, student_KV = (torch.randn(6, 20, generator=generator).log_softmax(-1) for _ in range(2))
    ids_KC = teacher_KV.topk(5).indices
    few = [with_rest(logps_KV.gather(1, ids_KC)) for logps_KV in (teacher_KV, student_KV)]
    for divergence in (forward_kl, reverse_kl, lambda p, q: generalised_jsd(p, q, 0.3)):
        assert divergence(teacher_KV, teacher_KV).abs().max() < 1e-6
        whole_K, few_K = divergence(teacher_KV, student_KV), divergence(*few)
        assert ((few_K >= 0) & (few_K <= whole_K + 1e-6)).all()


def test_top_tokens_and_candidates_are_read_off_the_softmax() -> None:
    logits_KV = torch.tensor([[0.0, math.log(3.0), math.log(4.0)]])
    ids_KC, logps_KC = top_logps(logits_KV, 2)
    assert ids_KC.tolist() == [[2.0, 1.0]]
    assert logps_KC.exp()[0].tolist() == pytest.approx([0.5, 0.375])
    assert top_logps(logits_KV, 9).shape == (2, 1, 3)
    logps = candidate_logps(logits_KV, torch.tensor([0]), torch.tensor([[2, 1]]))
    assert logps.exp()[0].tolist() == pytest.approx([0.125, 0.5, 0.375])
