"""Completions of prompts; nothing is trained or judged."""

from __future__ import annotations

from alignment.flows.results import Outputs
from alignment.tasks import data, rollout
from alignment_core.recipes.methods.generate import GenerateRecipe


def generate(recipe: GenerateRecipe) -> Outputs:
    """Compose the recipe."""
    model = data.base_model("model", recipe.model)
    prompts = data.dataset("generate/prompts", recipe.generate.prompts, "prompts", model, held_out=True)
    return Outputs(rollouts=rollout.generate("generate", recipe.generate.generation, model, prompts))
