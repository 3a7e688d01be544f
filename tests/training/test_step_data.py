"""How the completions of a step are divided into optimiser steps."""

from __future__ import annotations

import pytest

from alignment_core.training.step_data import StepData


def of_rows(count: int) -> StepData:
    return StepData.of([[1]] * count, [[2]] * count, [[True]] * count)


@pytest.mark.parametrize(
    ("rows", "batch_size", "sizes"),
    [
        (65, 64, [32, 33]),  # 64 and 1 would give one row the weight of 64
        (128, 64, [64, 64]),
        (64, 64, [64]),
        (3, 64, [3]),
        (14, 6, [4, 5, 5]),
        (7, 2, [1, 2, 2, 2]),
    ],
)
def test_batches_of_optimiser_steps_differ_by_at_most_a_row(rows: int, batch_size: int, sizes: list[int]) -> None:
    data = of_rows(rows)
    batches = data.batches(seed=3, epoch=1, batch_size=batch_size)
    assert [len(batch) for batch in batches] == sizes
    assert [row for batch in batches for row in batch] == data.order(3, 1), "each row once, in the order of the epoch"
