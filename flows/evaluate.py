"""Models side by side on held-out prompts; nothing is trained."""

from __future__ import annotations

from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data
from alignment.tasks.branches import independent
from alignment.tasks.graph import CURRENT, artifact
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods.evaluate import BASELINE, EvaluateRecipe


def evaluate(recipe: EvaluateRecipe) -> Outputs:
    """Compose the recipe. A model that cannot be loaded or sampled from is left out, unless all are."""
    base = data.base_model("model", recipe.model)
    with independent():
        models = {name: data.base_model(name, model) for name, model in recipe.models.items()}
    for name, model in models.items():
        ours, theirs = artifact(base), artifact(model)
        if ours and theirs:
            cure = "evaluate it in a recipe of its own"
            check_same_tokenizer(CURRENT.get().store, ours, theirs, f"models.{name}", cure)
    evaluations = Evaluations(recipe, base, None)
    evaluations.add(BASELINE, base)
    with independent():
        for label, model in models.items():
            evaluations.add(label, model)
    failed = evaluations.leave_out_failed()
    if models and models.keys() <= failed.keys():
        raise next(iter(failed.values()))
    return Outputs(report=evaluations.report(), evaluations=evaluations)
