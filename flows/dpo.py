"""DPO on given pairs, after SFT if the recipe has one, evaluated on held-out prompts if it says so."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, training
from alignment_core.recipes.methods.dpo import DpoRecipe


def dpo(recipe: DpoRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    pairs = data.dataset("dpo/data", recipe.dpo.data, "preferences", base)
    policy = training.dpo("dpo", recipe.dpo.training, recipe.dpo.loss, start, pairs)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("start", start)
        evaluations.add("dpo", policy)
    return Outputs(policy=policy, report=evaluations.report(), final="dpo", baseline="start", evaluations=evaluations)
