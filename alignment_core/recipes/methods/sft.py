"""The method ``sft``: supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.training import SftConfig


class SftRecipe(BaseRecipe):
    """Supervised fine-tuning."""

    method: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
    sft: SftConfig
    """Demonstrations and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        return (*super().measured_in_training, *(("test_loss",) if self.sft.data.has_test_rows else ()))


METHOD = Method(SftRecipe, composition="alignment.flows.sft:sft", decides={"sft/data": "sft.data", "sft": "sft"})
