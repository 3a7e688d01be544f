"""Kahneman–Tversky optimisation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config, unkeyed
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.recipes.sections.training import TrainingConfig


class KtoLossConfig(Config):
    """The loss of a labelled completion."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto` compares the log-ratio with a baseline, an estimate of the KL divergence from mismatched pairs of prompt and
    completion over the whole batch; `apo_zero_unpaired` compares it with 0, without the forward passes of this estimate."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the KL penalty to the reference policy."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of the loss of desirable completions. The ratio of desirable to undesirable rows, each times its weight, should be
    between 1 and 3/2 (Ethayarajh et al. 2024)."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of the loss of undesirable completions."""
    sync_ref_model: ReferenceSyncConfig | None = unkeyed(None)
    """Update the reference during training (TR-DPO). It is then a second copy of the model with forward passes in every step,
    of mismatched completions, too. Default: the reference is fixed, and its log-probabilities are computed once."""


class KtoConfig(Config):
    """Kahneman–Tversky optimisation on completions that are labelled desirable or undesirable."""

    data: DataConfig
    """Completions with a boolean `label`, or preference pairs, each of which becomes two rows."""
    loss: KtoLossConfig = KtoLossConfig()
    """The loss."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, warmup_ratio=0.1)
    """Optimiser and schedule. `batch_size` counts completions."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> KtoConfig:
        self.training.check_held_out(self.data)
        if self.loss.sync_ref_model and self.training.lora:
            raise ValueError(
                "`loss.sync_ref_model` mixes whole weights, and `training.lora` trains none: remove one of them"
            )
        return self
