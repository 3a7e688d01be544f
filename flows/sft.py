"""Supervised fine-tuning, evaluated on held-out prompts if the recipe says so."""

from __future__ import annotations

from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, training
from alignment_core.recipes.methods.sft import SftRecipe


def sft(recipe: SftRecipe) -> Outputs:
    """Compose the recipe."""
    base = data.base_model("model", recipe.model)
    demonstrations = data.dataset("sft/data", recipe.sft.data, "demonstrations", base)
    section = recipe.sft
    policy = training.sft("sft", section.training, base, demonstrations, disable_dropout=section.disable_dropout)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("start", base)
        evaluations.add("sft", policy)
    return Outputs(policy=policy, report=evaluations.report(), final="sft", baseline="start", evaluations=evaluations)
