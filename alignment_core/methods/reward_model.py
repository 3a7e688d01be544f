"""The method ``reward-model``: a reward model from preference pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import reward_model
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.training import RewardModelConfig


class RewardModelRecipe(BaseRecipe):
    """A reward model from preference pairs."""

    method: Literal["reward-model"] = "reward-model"
    """Reward-model training."""
    reward_model: RewardModelConfig
    """Pairs and training."""

    @model_validator(mode="after")
    def _needs_pairs(self) -> RewardModelRecipe:
        if self.reward_model.data is None or self.reward_model.model is not None:
            raise ValueError(
                "give `reward_model.data` instead of `reward_model.model`: this recipe trains a reward model"
            )
        if self.evaluation or self.promotion:
            raise ValueError(
                "a reward model is evaluated on its held-out pairs (`test_rows`): remove `evaluation`, `promotion`"
            )
        return self


def compose(recipe: RewardModelRecipe) -> Outputs:
    """Compose the recipe."""
    base = steps.base_model("model", recipe.model)
    return Outputs(reward_model=reward_model(recipe.reward_model, base, base))


METHOD = Method(
    RewardModelRecipe,
    compose,
    decides={"reward-model/data": "reward_model.data", "reward-model": "reward_model"},
    init=Init(
        kinds=("preferences",),
        sections=sections.reward_model,
        why="pairs of a better and a worse answer, to judge others by",
        evaluates=False,
        promotes=False,
    ),
)
