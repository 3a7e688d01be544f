"""KTO on labelled completions, after SFT if the recipe has one, evaluated on held-out prompts if it says so."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data
from alignment.tasks.kto import kto as train
from alignment_core.recipes.methods.kto import KtoRecipe


def kto(recipe: KtoRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    rows = data.dataset("kto/data", recipe.kto.data, "unpaired", base)
    policy = train("kto", recipe.kto.training, recipe.kto.loss, start, rows)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("start", start)
        evaluations.add("kto", policy)
    return Outputs(policy=policy, report=evaluations.report(), final="kto", baseline="start", evaluations=evaluations)
