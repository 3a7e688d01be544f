"""Distillation: a divergence between teacher and student at each target of demonstrations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from alignment_core.columns import column
from alignment_core.losses.distillation import forward_kl, generalised_jsd, reverse_kl, with_rest
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.recipes.sections.distillation import DistillationLossConfig
from alignment_core.training.methods.sft import Sft

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


class Distillation(Sft):
    """Mean divergence per target token of the batch, plus a weighted negative log-likelihood of the targets themselves."""

    loss_is_sum: ClassVar[bool] = False

    def __init__(self, config: DistillationLossConfig) -> None:
        self.config = config

    def rows(self, table: pa.Table) -> list[Row]:
        return [
            with_teacher(row, ids, logps)
            for row, ids, logps in zip(
                super().rows(table), column(table, "teacher_ids"), column(table, "teacher_logps"), strict=True
            )
        ]

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        if not batch.rows:  # the pack of a rank without rows, whose backward pass must still take part in collectives
            return output.sum(), dict.fromkeys(("loss", "kl", "nll"), output.detach().sum())
        logps = [row.sequences[0].candidate_values for row in batch.rows]
        teacher_KC = with_rest(output.new_tensor(np.concatenate([values for values in logps if values is not None])))
        student_KC = with_rest(output[:, 1:])
        forward = forward_kl(teacher_KC, student_KC)
        if self.config.divergence == "forward_kl":
            divergence = forward
        elif self.config.divergence == "reverse_kl":
            divergence = reverse_kl(teacher_KC, student_KC)
        else:
            divergence = generalised_jsd(teacher_KC, student_KC, self.config.jsd_beta)
        nll = -output[:, 0].sum()
        loss = divergence.sum() + self.config.nll_weight * nll
        metrics = {"loss": loss, "kl": forward.sum(), "nll": nll}
        return loss, {name: value.detach() for name, value in metrics.items()}


def with_teacher(row: Row, ids: np.ndarray, logps: np.ndarray) -> Row:
    """The row with a teacher's candidates for its targets, given as flattened arrays of [targets, C]."""
    (sequence,) = row.sequences
    targets = int(sequence.targets.sum())
    candidates = np.asarray(ids, np.int32).reshape(targets, -1)
    values = np.asarray(logps, np.float32).reshape(targets, -1)
    return replace(row, sequences=(replace(sequence, candidates=candidates, candidate_values=values),))
