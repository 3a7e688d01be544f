"""Models side by side on held-out prompts; nothing is trained."""

from __future__ import annotations

from alignment.flows.evaluation import Evaluations
from alignment.flows.outputs import Outputs
from alignment.tasks import data
from alignment.tasks.graph import CURRENT, artifact
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods.evaluate import BASELINE, EvaluateRecipe


def evaluate(recipe: EvaluateRecipe) -> Outputs:
    """Compose the recipe."""
    base = data.base_model("model", recipe.model)
    models = {name: data.base_model(name, model) for name, model in recipe.models.items()}
    for name, model in models.items():
        ours, theirs = artifact(base), artifact(model)
        if ours and theirs:
            cure = "evaluate it in a recipe of its own"
            check_same_tokenizer(CURRENT.get().store, ours, theirs, f"models.{name}", cure)
    evaluations = Evaluations(recipe, base, None)
    for label, model in {BASELINE: base, **models}.items():
        evaluations.add(label, model)
    return Outputs(report=evaluations.report(), evaluations=evaluations)
