"""Weights that correct for another sampling policy, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alignment_core.losses.mismatch import correction_weights

SEQUENCE = torch.tensor([0, 0, 1])
SAMPLED = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64).log()
RATIOS = torch.tensor([1.6, 1.0, 0.4], dtype=torch.float64).log()


def weights(level: str, action: str, measure: str, low: float, high: float) -> Any:
    options = {"level": level, "action": action, "measure": measure, "low": low, "high": high}
    return pytest.approx(correction_weights(RATIOS, SAMPLED, SEQUENCE, 2, **options).tolist(), abs=1e-9)  # type: ignore[arg-type]


def test_truncated_importance_sampling_clips_from_above_alone() -> None:
    assert weights("token", "clip", "ratio", 0.0, 1.5) == [1.5, 1.0, 0.4]


def test_icepop_gives_tokens_outside_no_weight() -> None:
    assert weights("token", "mask", "ratio", 0.5, 1.5) == [0.0, 1.0, 0.0]
    assert weights("token", "mask", "ratio", 0.5, 2.0) == [1.6, 1.0, 0.0]


def test_a_sequence_is_judged_by_the_product_of_its_ratios() -> None:
    assert weights("sequence", "mask", "ratio", 0.5, 2.0) == [1.6, 1.6, 0.0]
    assert weights("sequence", "clip", "ratio", 0.5, 1.2) == [1.2, 1.2, 0.5]


def test_total_variation_of_the_sampled_token() -> None:
    # p = 0.5; q = 0.8, 0.5, 0.2: differences 0.3, 0, 0.3. A bound of 0.2 puts q at 0.7 and 0.3: ratios 1.4 and 0.6
    assert weights("token", "mask", "tv", 0.0, 0.2) == [0.0, 1.0, 0.0]
    assert weights("token", "clip", "tv", 0.0, 0.2) == [1.4, 1.0, 0.6]
    # over sequences: means 0.15 and 0.3
    assert weights("sequence", "mask", "tv", 0.0, 0.2) == [1.6, 1.0, 0.0]


def test_binary_kl_of_the_sampled_token() -> None:
    # ½ log(0.5 / 0.8) + ½ log(0.5 / 0.2) = 0.2231436, at both ends
    assert weights("token", "mask", "kl", 0.0, 0.2232) == [1.6, 1.0, 0.4]
    assert weights("token", "mask", "kl", 0.0, 0.2231) == [0.0, 1.0, 0.0]
    # sequence 0: 0.1115718 on average
    assert weights("sequence", "mask", "kl", 0.0, 0.112) == [1.6, 1.0, 0.0]


def test_a_sure_token_does_not_divide_by_zero() -> None:
    sure = torch.zeros(3, dtype=torch.float64)
    weights = correction_weights(
        torch.tensor([0.0, -0.1, 0.1]), sure, SEQUENCE, 2, level="token", action="clip", measure="kl", low=0, high=0.01
    )
    assert torch.isfinite(weights).all()
