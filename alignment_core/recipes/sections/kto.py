"""Kahneman–Tversky optimisation: which rows, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.training import TrainingConfig


class KtoLossConfig(Config):
    """The loss of a labelled completion."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto` compares the log-ratio with a baseline, an estimate of the KL divergence from mismatched pairs of prompt and
    completion over the whole batch; `apo_zero_unpaired` compares it with 0, which saves the passes that estimate it."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the KL penalty to the reference policy."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of the loss of desirable completions. Weighted by these two, there should be between 1 and 4/3 times as many
    desirable rows as undesirable ones."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of the loss of undesirable completions."""


class KtoConfig(Config):
    """Kahneman–Tversky optimisation on completions that are labelled desirable or undesirable."""

    data: DataConfig
    """Completions with a boolean `label`, or preference pairs, of which each becomes two rows."""
    loss: KtoLossConfig = KtoLossConfig()
    """The loss."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6)
    """Optimiser and schedule. `batch_size` counts completions."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> KtoConfig:
        self.training.check_held_out(self.data)
        return self
