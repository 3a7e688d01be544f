"""DPO and its relatives with a β that changes: over the training, or with each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from alignment_core.losses.preference import dynamic_beta
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.pairs import split_pairs

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


class DynamicDpo(Dpo):
    """The metric ``beta`` is that of a step. Held-out rows have the configured ``beta``."""

    passes_trained_rows: ClassVar[bool] = True
    passes_held_out: ClassVar[bool] = False

    def rows_before(self, table: pa.Table) -> list[Row]:
        return self.rows(table) if self.config.beta_alpha else []

    def sums_before(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> Tensor:
        """The margins of the log-ratios of the pairs, in nats. [1]"""
        assert reference_S is not None, "the stage reference_logps comes before"
        chosen_P, rejected_P = split_pairs(self._log_ratios(output, batch, reference_S))
        return (chosen_P - rejected_P).sum()[None]

    def of_batch(self, rows: Sequence[Row], sums: Tensor | None, done: float | None) -> Dpo:
        if done is None:
            return Dpo(self.config, self.bf16)
        beta = self.config.beta
        if self.config.final_beta is not None:
            beta += (self.config.final_beta - beta) * done
        if sums is not None:
            margin = beta * float(sums[0]) / len(rows)
            beta = dynamic_beta(beta, margin, self.config.beta_alpha, self.config.beta_margin)
        return _OfBatch(self.config.model_copy(update={"beta": beta}), self.bf16)


class _OfBatch(Dpo):
    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().loss(output, batch, reference_S)
        return loss, {**metrics, "beta": loss.new_tensor(self.config.beta * len(batch.rows))}
