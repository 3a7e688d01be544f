"""DPO and its relatives: the policy's log-ratio to a reference, chosen against rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.losses.preference import dpo_loss, ipo_loss
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.pairs import pair_rows, split_pairs

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


class Dpo:
    """Mean preference loss per pair of the batch, plus a weighted mean NLL per token of the chosen completions."""

    head: ClassVar[Head] = "lm"
    needs_reference: ClassVar[bool] = True

    def __init__(self, config: DpoLossConfig) -> None:
        self.config = config

    def rows(self, table: pa.Table) -> list[Row]:
        return pair_rows(table)

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(len(rows)))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert reference_S is not None, "the stage reference_logps comes before"
        config = self.config
        logps_S = sum_by_sequence(output, batch.sequence_K, batch.sequences)
        tokens_S = sum_by_sequence(output.new_ones(len(output)), batch.sequence_K, batch.sequences).clamp(min=1)
        ratio_S = logps_S - reference_S
        chosen_P, rejected_P = split_pairs(ratio_S)
        if config.loss_type == "ipo":
            pairs_P = ipo_loss(*split_pairs(ratio_S / tokens_S), config.beta)
        else:
            pairs_P = dpo_loss(chosen_P, rejected_P, config.beta, config.label_smoothing)
        nll_P = -split_pairs(logps_S / tokens_S)[0]
        loss = (pairs_P + config.nll_weight * nll_P).sum()
        metrics = {
            "loss": loss,
            "accuracy": (chosen_P > rejected_P).float().sum(),
            "reward_chosen": config.beta * chosen_P.sum(),
            "reward_rejected": config.beta * rejected_P.sum(),
            "margin": config.beta * (chosen_P - rejected_P).sum(),
            "nll": nll_P.sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
