"""The method ``kto``: Kahneman–Tversky optimisation on labelled completions."""

from __future__ import annotations

from typing import Literal

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.kto import KtoConfig
from alignment_core.recipes.sections.training import SftConfig


class KtoRecipe(BaseRecipe):
    """KTO, or the unpaired form of APO-zero, on completions that are labelled desirable or undesirable."""

    method: Literal["kto"] = "kto"
    """Kahneman–Tversky optimisation on labelled completions."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first."""
    kto: KtoConfig
    """Labelled completions and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        held_out = self.kto.data.has_test_rows
        return (*super().measured_in_training, *(("test_accuracy", "test_loss") if held_out else ()))


METHOD = Method(
    KtoRecipe,
    composition="alignment.flows.kto:kto",
    decides={
        "kto/data": "kto.data",
        "kto/reference-logps:order": "the order of the rows",
        "kto/reference-logps:mismatched": "kto.loss.loss_type",
        "kto/reference-logps": "kto.training",
        "kto": "kto",
    },
)
