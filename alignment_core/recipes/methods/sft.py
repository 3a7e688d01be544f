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


METHOD = Method(SftRecipe, composition="alignment.flows.sft:sft", decides={"sft/data": "sft.data", "sft": "sft"})
