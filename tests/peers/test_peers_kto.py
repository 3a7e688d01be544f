"""KTO by our training method and by TRL's trainer on the same tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import trl_parts as trl
from ragged import MASK_ST, draw, micro_batch, packed, same, same_with_gradient
from torch import Tensor

from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.training.methods.kto import Kto

BETA, WEIGHTS = 0.3, (1.2, 0.7)
LOGPS_ST, REFERENCE_ST = -draw(70).abs(), -draw(71).abs()
DESIRABLE_S = torch.tensor([True, False, True, True, False, False])
MISMATCHED_S = -draw(72, len(MASK_ST)).abs(), -draw(73, len(MASK_ST)).abs() - 2
"""Log-probabilities of mismatched completions by policy and reference: on average higher for the policy."""
ROWS = [SimpleNamespace(margin=float(desirable)) for desirable in DESIRABLE_S]


def ours(logps_ST: Tensor, loss_type: str = "kto", mismatched_S: tuple[Tensor, Tensor] = MISMATCHED_S) -> Tensor:
    """The loss of a batch, divided as our trainer divides it."""
    config = KtoLossConfig(
        loss_type=loss_type,  # type: ignore[arg-type]
        beta=BETA,
        desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1],
    )
    sums = (mismatched_S[0] - mismatched_S[1]).sum()[None] if loss_type == "kto" else None
    batch = micro_batch()
    batch.rows = ROWS
    method = Kto(config).of_batch(ROWS, sums)  # type: ignore[arg-type]
    loss, _ = method.loss(packed(logps_ST), batch, (REFERENCE_ST * MASK_ST).sum(1))  # type: ignore[arg-type]
    return loss / method.normaliser(ROWS)  # type: ignore[arg-type]


def of_trl(
    logps_ST: Tensor,
    loss_type: str = "kto",
    mismatched_S: tuple[Tensor, Tensor] = MISMATCHED_S,
    part: slice = slice(None),
) -> Tensor:
    of_part = [tensor[part] for tensor in (logps_ST, REFERENCE_ST, MASK_ST, DESIRABLE_S)]
    of_others = mismatched_S[0][part], mismatched_S[1][part]
    return trl.kto_loss(*of_part, of_others, loss_type, BETA, WEIGHTS)


def test_kto_is_trls() -> None:
    assert (MISMATCHED_S[0] - MISMATCHED_S[1]).mean() > 0.5, "the baseline counts"
    same_with_gradient(ours, of_trl, LOGPS_ST)


def test_a_negative_mean_of_mismatched_log_ratios_is_a_baseline_of_zero_in_both() -> None:
    swapped_S = MISMATCHED_S[::-1]
    same_with_gradient(lambda x: ours(x, mismatched_S=swapped_S), lambda x: of_trl(x, mismatched_S=swapped_S), LOGPS_ST)


def test_apo_zero_unpaired_is_trls() -> None:
    same_with_gradient(lambda x: ours(x, "apo_zero_unpaired"), lambda x: of_trl(x, "apo_zero_unpaired"), LOGPS_ST)


def test_trls_baseline_is_of_the_micro_batch_and_ours_of_the_whole_batch() -> None:
    halves = [slice(0, 3), slice(3, 6)]
    in_halves = torch.stack([of_trl(LOGPS_ST, part=half) for half in halves]).mean()
    assert abs(in_halves - ours(LOGPS_ST)) > 1e-4
    ratio_S = MISMATCHED_S[0] - MISMATCHED_S[1]
    one_mean_S = ratio_S.mean().expand(len(ratio_S)), torch.zeros_like(ratio_S)  # every micro-batch with the same mean
    same(torch.stack([of_trl(LOGPS_ST, mismatched_S=one_mean_S, part=half) for half in halves]).mean(), ours(LOGPS_ST))


@pytest.mark.parametrize("label", [True, False])
def test_batches_with_a_single_label_have_a_loss_in_both(label: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.DESIRABLE_S", torch.full_like(DESIRABLE_S, label))
    monkeypatch.setattr(f"{__name__}.ROWS", [SimpleNamespace(margin=float(label))] * len(ROWS))
    same_with_gradient(ours, of_trl, LOGPS_ST)
