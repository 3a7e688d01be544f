"""Averages of tensors, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from alignment_core.models.merging import linear, slerp, ties


def test_linear_is_the_weighted_mean_whatever_the_weights_add_up_to() -> None:
    tensors = [torch.tensor([1.0, -2.0]), torch.tensor([5.0, 2.0])]
    assert linear(tensors, [1, 3]).tolist() == linear(tensors, [0.25, 0.75]).tolist() == [4.0, 1.0]
    halves = [tensor.bfloat16() for tensor in tensors]
    assert linear(halves, [1, 1]).dtype == torch.float32


def test_slerp_goes_along_the_arc() -> None:
    one, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    torch.testing.assert_close(slerp(one, other, 0.5), torch.tensor([[math.sqrt(2), math.sqrt(2)]]))
    torch.testing.assert_close(slerp(one, other, 1 / 3), torch.tensor([[math.sqrt(3), 1.0]]))
    assert slerp(one, other, 0).equal(one)
    torch.testing.assert_close(slerp(one, other, 1), other)


@pytest.mark.parametrize("other", [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0], [-3.0, -4.0]])
def test_slerp_of_parallel_and_empty_tensors_is_the_mean(other: list[float]) -> None:
    one = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(slerp(one, torch.tensor(other), 0.25), 0.75 * one + 0.25 * torch.tensor(other))


def test_ties_trims_elects_signs_and_averages_those_that_agree() -> None:
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    changes = torch.tensor([[4.0, -3.0, 0.5, 0.0], [2.0, 5.0, 0.1, -1.0]])
    # Kept of the first: 4, -3; of the second: 2, 5. Signs: +, + (5 against 3), none. Means of those that agree: 3, 5.
    merged = ties(base, [base + change for change in changes], [1, 1], density=0.5, scale=2.0)
    assert merged.tolist() == [7.0, 11.0, 1.0, 1.0]


def test_ties_weighs_signs_and_means() -> None:
    base = torch.zeros(2)
    # 3 · 1 against 1 · 2 at the first place: the first model's sign; (3 · 4 + 1 · 8) / 4 at the second.
    merged = ties(base, [torch.tensor([1.0, 4.0]), torch.tensor([-2.0, 8.0])], [3, 1], density=1, scale=1)
    assert merged.tolist() == [1.0, 5.0]


def test_ties_keeps_one_change_at_least() -> None:
    assert ties(torch.zeros(3), [torch.tensor([1.0, 3.0, 2.0])], [1], density=0.01, scale=1).tolist() == [0, 3, 0]
