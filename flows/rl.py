"""Reinforcement learning, after SFT if the recipe has one, judged on held-out prompts if it says so."""

from __future__ import annotations

from alignment_core.recipes import RlRecipe
from flows.evaluation import Evaluations
from flows.runs import Outputs
from flows.start import base_and_start
from tasks import data
from tasks import rl as tasks


def rl(recipe: RlRecipe) -> Outputs:
    """Compose the recipe."""
    trust = recipe.model.trust_remote_code
    base, start = base_and_start(recipe)
    prompts = data.dataset("rl/prompts", recipe.rl.prompts, "prompts", base, trust)
    policy = tasks.rl("rl", recipe.rl, start, prompts, trust)
    evaluations = Evaluations(recipe, base, None)
    if recipe.evaluation:
        evaluations.add("sft" if recipe.sft else "start", start)
        evaluations.add("rl", policy)
    return Outputs(policy=policy, report=evaluations.report(), final="rl", baseline="sft" if recipe.sft else "start")
