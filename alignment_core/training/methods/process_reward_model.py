"""The process reward model: after each step of an answer, the probability of the good against the bad verdict token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from alignment_core.columns import column
from alignment_core.losses.process_reward import step_loss
from alignment_core.losses.ties import logp_rounding, positive
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


@dataclass(frozen=True)
class ProcessRewardModel:
    """Mean cross-entropy per step of the batch, over the two verdict tokens only."""

    verdict_ids: tuple[int, int]
    """The good token and the bad one."""
    bf16: bool = False
    """Whether the model computes in bf16; decides which differences are ties."""
    head: ClassVar[Head] = "lm"
    needs_reference: ClassVar[bool] = False

    def rows(self, table: pa.Table) -> list[Row]:
        columns = (column(table, name) for name in ("prompt_ids", "completion_ids", "step_ends", "labels"))
        return [
            Row(number, (self._sequence(prompt, completion, ends, labels),))
            for number, (prompt, completion, ends, labels) in enumerate(zip(*columns, strict=True))
        ]

    def _sequence(
        self, prompt: np.ndarray, completion: np.ndarray, ends: np.ndarray, labels: np.ndarray
    ) -> TokenSequence:
        """The target is the place after a step's end; the verdict tokens are its candidates, and its own token is not used."""
        ids = np.concatenate([prompt, completion, self.verdict_ids[:1]]).astype(np.int64)
        targets = np.zeros(len(ids), bool)
        targets[len(prompt) + np.asarray(ends, np.int64) + 1] = True
        candidates = np.tile(np.asarray(self.verdict_ids, np.int64), (len(ends), 1))
        labels = np.asarray(labels, np.float32)
        return TokenSequence(ids, targets, candidates, np.stack([labels, 1 - labels], axis=1))

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(sum(row.sequences[0].targets.sum() for row in rows)))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        if not batch.rows:  # the pack of a rank without rows, whose backward pass must still take part in collectives
            return output.sum(), dict.fromkeys(("loss", "accuracy", "label"), output.detach().sum())
        log_odds_K = output[:, 1] - output[:, 2]
        labels = [row.sequences[0].candidate_values for row in batch.rows]
        label_K = output.new_tensor(np.concatenate([values[:, 0] for values in labels if values is not None]))
        loss = step_loss(log_odds_K, label_K).sum()
        metrics = {
            "loss": loss,
            "accuracy": positive(torch.where(label_K > 0.5, log_odds_K, -log_odds_K), logp_rounding(self.bf16)).sum(),
            "label": label_K.sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
