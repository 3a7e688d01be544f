"""Several models, fine-tuned first if the recipe says so → one average of their weights → evaluation."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, training
from alignment.tasks.graph import Input, submit
from alignment_core.recipes.methods.merge import MergeRecipe
from alignment_core.stages.merge import BASE, MergeStageConfig


def merge(recipe: MergeRecipe) -> Outputs:
    """Compose the recipe."""
    section = recipe.merge
    base, start = base_and_start(recipe, recipe.sft)
    models: dict[str, Input] = {}
    for number, one in enumerate(section.models, start=1):
        label = f"model-{number}"
        own = data.base_model(label, one.model) if one.model else None
        model = own or start
        if one.sft:
            demonstrations = data.dataset(f"{label}/sft/data", one.sft.data, "demonstrations", own or base)
            model = training.sft(
                f"{label}/sft", one.sft.training, model, demonstrations, disable_dropout=one.sft.disable_dropout
            )
        models[label] = model
    config = MergeStageConfig(
        merge_method=section.merge_method,
        weights=tuple(one.weight for one in section.models),
        density=section.density if section.merge_method == "ties" else None,
        scale=section.scale if section.merge_method == "ties" else None,
    )
    policy = submit("merge", "merge", config, {**models, BASE: start if section.merge_method != "linear" else None})
    evaluations = Evaluations(recipe, base, None)
    for label, one_of_all in {"start": start, **models, "merge": policy}.items():
        evaluations.add(label, one_of_all)
    return Outputs(policy=policy, report=evaluations.report(), final="merge", baseline="start", evaluations=evaluations)
