"""DPO on given pairs, after SFT if the recipe has one, judged on held-out prompts if it says so."""

from __future__ import annotations

from alignment_core.recipes import DpoRecipe
from flows.evaluation import Evaluations
from flows.runs import Outputs
from tasks import data, training
from tasks.stage import Input


def dpo(recipe: DpoRecipe) -> Outputs:
    """Compose the recipe."""
    trust = recipe.model.trust_remote_code
    base = data.base_model("model", recipe.model)
    start: Input = base
    if recipe.sft:
        demonstrations = data.dataset("sft/data", recipe.sft.data, "sft", base, trust)
        start = training.sft("sft", recipe.sft.training, base, demonstrations, trust)
    pairs = data.dataset("dpo/data", recipe.dpo.data, "preference", base, trust)
    policy = training.dpo("dpo", recipe.dpo.training, recipe.dpo.loss, start, pairs, trust_remote_code=trust)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("start", start)
        evaluations.add("dpo", policy)
    return Outputs(policy=policy, report=evaluations.report(), final="dpo", baseline="start")
