"""Supervised fine-tuning: cross-entropy on the target tokens of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from alignment_core.columns import column
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


class Sft:
    """Mean negative log-likelihood per target token of the batch."""

    head: ClassVar[Head] = "lm"
    needs_reference: ClassVar[bool] = False
    loss_is_sum: ClassVar[bool] = True

    def rows(self, table: pa.Table) -> list[Row]:
        rows = []
        for number, (ids, mask) in enumerate(zip(column(table, "input_ids"), column(table, "loss_mask"), strict=True)):
            targets = np.asarray(mask, bool)
            targets[0] = False  # nothing precedes the first token, so nothing predicts it
            rows.append(Row(number, (TokenSequence(np.asarray(ids, np.int64), targets),)))
        return rows

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(sum(row.sequences[0].targets.sum() for row in rows)))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -output.sum()
        return loss, {"loss": loss.detach()}
