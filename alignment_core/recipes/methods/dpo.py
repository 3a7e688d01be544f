"""The method ``dpo``: direct preference optimisation on given pairs."""

from __future__ import annotations

from typing import Literal

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.training import DpoConfig, SftConfig


class DpoRecipe(BaseRecipe):
    """DPO, IPO or cDPO on a fixed set of pairs."""

    method: Literal["dpo"] = "dpo"
    """Direct preference optimisation on given pairs."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first."""
    dpo: DpoConfig
    """Pairs and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        held_out = self.dpo.data.has_test_rows
        return (*super().measured_in_training, *(("test_margin", "test_accuracy", "test_loss") if held_out else ()))


METHOD = Method(
    DpoRecipe,
    composition="alignment.flows.dpo:dpo",
    decides={
        "dpo/data": "dpo.data",
        "dpo/reference-logps:order": "the order of the rows",
        "dpo/reference-logps": "dpo.training",
        "dpo": "dpo",
    },
)
