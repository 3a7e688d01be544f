"""A changing β: its value in each step, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from alignment_core.losses.preference import LEAST_BETA, dynamic_beta
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.base import BatchMethod
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.dpo_beta import DynamicDpo

ROWS = [
    Row(number, tuple(TokenSequence.of_prompt_and_completion([1], [2, side]) for side in (3, 4))) for number in range(2)
]


def method(**fields: float) -> DynamicDpo:
    return DynamicDpo(DpoLossConfig(beta=0.2, **fields))


def test_the_scheduled_beta_is_linear_from_first_to_last_step() -> None:
    scheduled = method(final_beta=1.0)
    assert isinstance(scheduled, BatchMethod)
    assert not isinstance(Dpo(DpoLossConfig()), BatchMethod)
    assert [scheduled.of_batch(ROWS, None, done).config.beta for done in (0.0, 0.25, 1.0)] == pytest.approx(
        [0.2, 0.4, 1.0]
    )
    assert scheduled.of_batch(ROWS, None, None).config.beta == 0.2, "held-out losses compare over the steps"


def test_the_dynamic_beta_of_a_batch_follows_its_margin() -> None:
    """Log-ratios: margins 3 and 1 nat, so that implicit rewards have the mean margin 0.2 · 2 = 0.4."""
    of_batches = method(beta_alpha=0.5, beta_margin=0.1)
    batch = pack(ROWS)
    logps_K = torch.tensor([-1.0, -1.0, -2.5, -2.5, -1.0, -1.0, -1.5, -1.5])
    sums = of_batches.sums_before(logps_K, batch, torch.zeros(4))
    assert float(sums) == 4.0
    batch_method = of_batches.of_batch(ROWS, sums, 0.0)
    assert batch_method.config.beta == pytest.approx(0.2 * (1 + 0.5 * (0.4 - 0.1)))
    loss, metrics = batch_method.loss(logps_K, batch, torch.zeros(4))
    expected = -torch.nn.functional.logsigmoid(batch_method.config.beta * torch.tensor([3.0, 1.0])).sum()
    torch.testing.assert_close(loss, expected)
    assert float(metrics["beta"]) / 2 == pytest.approx(batch_method.config.beta)


def test_the_dynamic_beta_stays_above_zero() -> None:
    assert dynamic_beta(0.1, -100.0, 0.6, 0.0) == LEAST_BETA


def test_a_method_without_a_forward_pass_has_no_dynamic_beta() -> None:
    import pyarrow as pa

    assert method(final_beta=0.3).rows_before(pa.table({})) == []
