"""Averages of tensors, worked out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from alignment_core.models.merging import least_kept, linear, slerp, ties


def test_linear_is_the_mean_with_normalised_weights() -> None:
    tensors = [torch.tensor([1.0, -2.0]), torch.tensor([5.0, 2.0])]
    assert linear(tensors, [1, 3]).tolist() == linear(tensors, [0.25, 0.75]).tolist() == [4.0, 1.0]
    halves = [tensor.bfloat16() for tensor in tensors]
    assert linear(halves, [1, 1]).dtype == torch.float32


def test_slerp_goes_along_the_arc_between_the_changes() -> None:
    base = torch.tensor([[10.0, -7.0]])
    first, second = base + torch.tensor([[2.0, 0.0]]), base + torch.tensor([[0.0, 2.0]])
    torch.testing.assert_close(slerp(base, first, second, 0.5) - base, torch.tensor([[math.sqrt(2), math.sqrt(2)]]))
    torch.testing.assert_close(slerp(base, first, second, 1 / 3) - base, torch.tensor([[math.sqrt(3), 1.0]]))
    assert slerp(base, first, second, 0).equal(first)
    torch.testing.assert_close(slerp(base, first, second, 1), second)


def test_slerp_of_two_small_changes_of_one_base_is_not_the_mean() -> None:
    """Two fine-tunes have nearly the direction of their base. Between changes of one length at a right angle the arc's middle
    has that length, and the mean 1/√2 of it."""
    base = torch.linspace(-1, 1, 1000)
    changes = torch.zeros(2, 1000)
    changes[0, ::2] = changes[1, 1::2] = 1e-3
    merged = slerp(base, base + changes[0], base + changes[1], 0.5) - base
    assert float(merged.norm()) == pytest.approx(float(changes[0].norm()), rel=1e-3)
    mean = linear([base + changes[0], base + changes[1]], [1, 1]) - base
    assert float(mean.norm()) == pytest.approx(float(changes[0].norm()) / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("second", [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0], [-3.0, -4.0]])
def test_slerp_of_parallel_and_empty_changes_is_the_mean(second: list[float]) -> None:
    change = torch.tensor([3.0, 4.0])
    expected = 0.75 * change + 0.25 * torch.tensor(second)
    torch.testing.assert_close(slerp(torch.zeros(2), change, torch.tensor(second), 0.25), expected)


def test_ties_trims_elects_signs_and_averages_those_that_agree() -> None:
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    changes = torch.tensor([[4.0, -3.0, 0.5, 0.0], [2.0, 5.0, 0.1, -1.0]])
    # Kept of the first: 4, -3; of the second: 2, 5. Signs: +, + (5 against 3), none. Means of the agreeing ones: 3, 5.
    least = [least_kept(partial(list, [change]), 0.5) for change in changes]
    assert least == [3.0, 2.0]
    merged = ties(base, [base + change for change in changes], [1, 1], least, scale=2.0)
    assert merged.tolist() == [7.0, 11.0, 1.0, 1.0]


def test_ties_weighs_signs_and_means() -> None:
    base = torch.zeros(2)
    # 3 · 1 against 1 · 2 at the first place: the first model's sign; (3 · 4 + 1 · 8) / 4 at the second.
    merged = ties(base, [torch.tensor([1.0, 4.0]), torch.tensor([-2.0, 8.0])], [3, 1], [0, 0], scale=1)
    assert merged.tolist() == [1.0, 5.0]


def test_ties_trims_the_whole_task_vector() -> None:
    """Of 8 changes in two tensors the 4 largest, 5, 6, 7 and 8, are in one of them (Yadav et al. 2023, section 3)."""
    changes = [torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.tensor([[-8.0, 7.0], [-6.0, 5.0]])]
    assert least_kept(lambda: changes, 0.5) == 5.0
    assert least_kept(lambda: changes, 0.01) == 8.0, "one change at least"
    assert least_kept(lambda: changes, 1) == 1.0


@pytest.mark.parametrize("density", [0.001, 0.2, 0.73, 1])
def test_the_least_magnitude_that_is_kept_is_that_of_a_sort(density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    changes = [torch.randn(number, generator=generator) * 10.0**-number for number in (1, 5, 300)]
    changes.append(torch.zeros(7))
    magnitudes = torch.cat(changes).abs().sort(descending=True).values
    assert least_kept(lambda: changes, density) == magnitudes[max(1, round(density * 313)) - 1]
