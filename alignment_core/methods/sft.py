"""The method ``sft``: supervised fine-tuning."""

from __future__ import annotations

from typing import Any, Literal

from alignment_core.composition.base_model import base_and_start
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.recipes.methods import Init, Method
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
        return (*super().measured_in_training, *self.sft.training.measured(self.sft.data, "test_loss"))


def compose(recipe: SftRecipe) -> Outputs:
    """Compose the recipe."""
    base, policy = base_and_start(recipe, recipe.sft)
    return Evaluations(recipe, base).outputs({"start": base, "sft": policy})


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from demonstrations."""
    return {
        "sft": {"data": sections.data(profile), "training": sections.training(profile, 1e-5, 1e-3)},
        **sections.evaluation(profile),
    }


METHOD = Method(
    SftRecipe,
    compose,
    decides={"sft/data": "sft.data", "sft": "sft"},
    init=Init(
        kinds=("demonstrations",),
        sections=init_sections,
        why="prompts with an answer each to imitate",
        rank=50,
        formats=("messages", "prompt_completion"),
    ),
)
