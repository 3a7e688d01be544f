"""A reward model from preference pairs."""

from __future__ import annotations

from alignment.flows.results import Outputs
from alignment.tasks import data, training
from alignment_core.recipes.methods.reward_model import RewardModelRecipe


def reward_model(recipe: RewardModelRecipe) -> Outputs:
    """Compose the recipe."""
    base = data.base_model("model", recipe.model)
    section = recipe.reward_model
    assert section.data is not None, "the recipe is validated"
    pairs = data.dataset("reward-model/data", section.data, "preferences", base)
    return Outputs(reward_model=training.reward_model("reward-model", section, base, pairs))
