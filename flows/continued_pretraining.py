"""Continued pre-training on plain text, evaluated on held-out prompts if the recipe says so."""

from __future__ import annotations

from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, pretraining
from alignment_core.data.kinds.documents import BLOCK_OVERLAP
from alignment_core.recipes.methods.continued_pretraining import ContinuedPretrainingRecipe

LABEL = "continued-pretraining"


def continued_pretraining(recipe: ContinuedPretrainingRecipe) -> Outputs:
    """Compose the recipe."""
    section = recipe.continued_pretraining
    base = data.base_model("model", recipe.model)
    settings = {BLOCK_OVERLAP: section.block_overlap}
    documents = data.dataset(f"{LABEL}/data", section.data, "documents", base, settings=settings)
    policy = pretraining.continued_pretraining(LABEL, section.training, base, documents)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("start", base)
        evaluations.add(LABEL, policy)
    return Outputs(policy=policy, report=evaluations.report(), final=LABEL, baseline="start", evaluations=evaluations)
