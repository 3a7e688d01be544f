"""The reward model: a score on the last token, trained so that chosen completions score above rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from alignment_core.losses.reward import bradley_terry_loss, centering_loss, log_exp_loss
from alignment_core.losses.ties import positive, score_rounding
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.training.methods.pairs import pair_rows, split_pairs

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


class RewardModel:
    """Mean Bradley–Terry (or log-exp) loss per pair of the batch."""

    head: ClassVar[Head] = "score"
    needs_reference: ClassVar[bool] = False

    def __init__(
        self,
        loss_type: Literal["sigmoid", "logexp"] = "sigmoid",
        bf16: bool = False,
        center_rewards_coefficient: float = 0.0,
    ) -> None:
        """``bf16``: whether the model computes in bf16; decides which differences are ties."""
        self.bf16 = bf16
        self.center_rewards_coefficient = center_rewards_coefficient
        self.pair_loss = {"sigmoid": bradley_terry_loss, "logexp": log_exp_loss}[loss_type]

    def rows(self, table: pa.Table) -> list[Row]:
        return pair_rows(table)

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(len(rows)))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_P, rejected_P = split_pairs(output.float())
        margin_P = chosen_P.new_tensor([row.margin for row in batch.rows])
        loss_P = self.pair_loss(chosen_P, rejected_P, margin_P)
        if self.center_rewards_coefficient:
            loss_P = loss_P + self.center_rewards_coefficient * centering_loss(chosen_P, rejected_P)
        loss = loss_P.sum()
        rounding_P = score_rounding(torch.maximum(chosen_P.abs(), rejected_P.abs()), self.bf16)
        metrics = {
            "loss": loss,
            "accuracy": positive(chosen_P - rejected_P, rounding_P).sum(),
            "margin": (chosen_P - rejected_P).sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
