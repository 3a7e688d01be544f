"""DPO and its relatives: chosen against rejected completions, most by the policy's log-ratio to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.losses.preference import LOSSES, f_derivative, tail_weights
from alignment_core.losses.ties import logps_rounding, positive
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

    def __init__(self, config: DpoLossConfig, bf16: bool = False) -> None:
        """``bf16``: whether the model computes in bf16; decides which differences are ties."""
        self.config = config
        self.needs_reference = config.needs_reference
        self.bf16 = bf16

    def rows(self, table: pa.Table) -> list[Row]:
        return pair_rows(table)

    def normaliser(self, rows: Sequence[Row]) -> float:
        return max(1.0, float(len(rows)))

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        logps_S = sum_by_sequence(output, batch.sequence_K, batch.sequences)
        # At least 1, so that the mean of an empty completion is 0 instead of NaN.
        tokens_S = sum_by_sequence(output.new_ones(len(output)), batch.sequence_K, batch.sequences).clamp(min=1)
        assert (reference_S is not None) or not self.needs_reference, "the stage reference_logps comes before"
        ratio_S = logps_S if reference_S is None else self._log_ratios(output, batch, reference_S)
        score_S = f_derivative(ratio_S, config.f_divergence_type, config.f_alpha_divergence_coef)
        nll_P = -split_pairs(logps_S / tokens_S)[0]
        loss = config.nll_weight * nll_P
        for name, weight in config.weights.items():
            preference_loss = LOSSES[name]
            sums_S = score_S if preference_loss.reference else logps_S
            values_S = sums_S / tokens_S if preference_loss.means else sums_S
            loss = loss + weight * preference_loss.of(*split_pairs(values_S), config)
        # The implicit reward is β times the log-ratio; without a reference, β times the mean log-probability (SimPO).
        chosen_P, rejected_P = split_pairs(ratio_S if self.needs_reference else logps_S / tokens_S)
        rounding_S = logps_rounding(logps_S, tokens_S, self.bf16)
        of_chosen_P, of_rejected_P = split_pairs(rounding_S if self.needs_reference else rounding_S / tokens_S)
        metrics = {
            "loss": loss.sum(),
            "accuracy": positive(chosen_P - rejected_P, of_chosen_P + of_rejected_P).sum(),
            "reward_chosen": config.beta * chosen_P.sum(),
            "reward_rejected": config.beta * rejected_P.sum(),
            "margin": config.beta * (chosen_P - rejected_P).sum(),
            "nll": nll_P.sum(),
        }
        return metrics["loss"], {name: value.detach() for name, value in metrics.items()}

    def _log_ratios(self, output: Tensor, batch: MicroBatch, reference_S: Tensor) -> Tensor:
        """Log-ratios of the completions in nats, with LD-DPO of weighted tokens, as in the reference's sums. [S]"""
        if self.config.ld_alpha is not None:
            tokens_S = sum_by_sequence(torch.ones_like(batch.sequence_K), batch.sequence_K, batch.sequences)
            output = output * tail_weights(batch.sequence_K, tokens_S, self.config.ld_alpha)
        return sum_by_sequence(output, batch.sequence_K, batch.sequences) - reference_S
