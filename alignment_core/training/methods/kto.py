"""KTO: the policy's log-ratio to a reference, of single completions that are labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from alignment_core.columns import column
from alignment_core.losses.kto import kl_baseline, kto_loss
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.losses.ties import logps_rounding, positive
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.training.kto_mismatch import mismatched
from alignment_core.training.training_rows import images_by_row

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


@dataclass(frozen=True)
class Kto:
    """Mean loss per row of the batch. The baseline is that of the whole batch; without one (``apo_zero_unpaired``) it is 0."""

    config: KtoLossConfig
    baseline: Tensor | float = 0.0
    """z₀ of the batch in nats."""
    bf16: bool = False
    """Whether the model computes in bf16; decides which differences are ties."""
    counts: tuple[float, float] = (0.0, 0.0)
    """Desirable and undesirable rows of the batch, for metrics."""
    head: ClassVar[Head] = "lm"
    needs_reference: ClassVar[bool] = True
    passes_trained_rows: ClassVar[bool] = False

    def rows(self, table: pa.Table) -> list[Row]:
        return list(_Rows(table, column(table, "completion_ids")))

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(len(rows)))

    def rows_before(self, table: pa.Table) -> Sequence[Row]:
        if self.config.loss_type != "kto":
            return []
        prompts, completions = (column(table, f"{name}_ids") for name in ("prompt", "completion"))
        return _Rows(table, mismatched(prompts, completions, images=images_by_row(table, Path())))

    def sums_before(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> Tensor:
        """The log-ratios of mismatched completions, in nats. [1]"""
        assert reference_S is not None, "the stage reference_logps comes before"
        return (sum_by_sequence(output, batch.sequence_K, batch.sequences) - reference_S).sum()[None]

    def of_batch(self, rows: Sequence[Row], sums: Tensor | None, done: float | None = None) -> Kto:
        desirable = sum(row.margin for row in rows)
        baseline = 0.0 if sums is None else kl_baseline(sums[0], len(rows)).float()
        return replace(self, baseline=baseline, counts=(desirable, len(rows) - desirable))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert reference_S is not None, "the stage reference_logps comes before"
        config = self.config
        logps_S = sum_by_sequence(output, batch.sequence_K, batch.sequences)
        tokens_S = sum_by_sequence(output.new_ones(len(output)), batch.sequence_K, batch.sequences)
        ratio_S = logps_S - reference_S
        desirable_S = ratio_S.new_tensor([row.margin for row in batch.rows])
        sign_S = 2 * desirable_S - 1
        weight_S = desirable_S * config.desirable_weight + (1 - desirable_S) * config.undesirable_weight
        loss = (weight_S * kto_loss(ratio_S, sign_S, self.baseline, config.beta)).sum()
        metrics = {
            "loss": loss,
            "accuracy": positive(
                sign_S * (ratio_S - self.baseline),
                2 * logps_rounding(logps_S, tokens_S, self.bf16),  # z₀ is rounded, too
            ).sum(),
            "baseline": (ratio_S.new_ones(len(ratio_S)) * self.baseline).sum(),
            "desirable": desirable_S.sum(),
            **self._rewards(config.beta * ratio_S, desirable_S),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _rewards(self, reward_S: Tensor, desirable_S: Tensor) -> dict[str, Tensor]:
        """Mean rewards of the batch's rows of each label, and their difference; without labels that the batch lacks."""
        labels = ("reward_desirable", desirable_S), ("reward_undesirable", 1 - desirable_S)
        rewards = {
            name: (has_S * reward_S).sum() * (sum(self.counts) / count)  # the trainer divides by all rows
            for (name, has_S), count in zip(labels, self.counts, strict=True)
            if count
        }
        if len(rewards) == len(labels):
            rewards["margin"] = rewards["reward_desirable"] - rewards["reward_undesirable"]
        return rewards


class _Rows(Sequence[Row]):
    """Each prompt of a table with a completion, made on access. The margin is 1 if the table's own completion is desirable, and
    0 if not."""

    def __init__(self, table: pa.Table, completions: Sequence) -> None:
        self.prompts = column(table, "prompt_ids")
        self.completions = completions
        self.labels = column(table, "label")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        sequence = TokenSequence.of_prompt_and_completion(self.prompts[number], self.completions[number])
        return Row(number, (sequence,), float(self.labels[number]))
