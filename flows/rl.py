"""Reinforcement learning, after SFT if the recipe has one, evaluated on held-out prompts if it says so."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start, reward_model, rewards
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data
from alignment.tasks import rl as tasks
from alignment_core.recipes.methods.rl import RlRecipe


def rl(recipe: RlRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    prompts = data.dataset("rl/prompts", recipe.rl.prompts, "prompts", base)
    judge = reward_model(recipe, recipe.reward_model, base, start)
    reward_models = rewards("rl.rewards", recipe.rl.rewards, judge, "rl").models
    critic = next(iter(reward_models.values()), None) if recipe.rl.critic else None
    pretraining = held_out = None
    if recipe.rl.pretraining:
        pretraining = data.dataset("rl/pretraining", recipe.rl.pretraining.data, "demonstrations", base)
    if recipe.rl.best:
        held_out = data.dataset(
            "rl/held-out", recipe.rl.best.prompts, "prompts", base, stream="held-out", held_out=True
        )
        data.overlap("rl/held-out/overlap", "rl.best.prompts", held_out, None)
    given = recipe.rl.kl.reference
    reference = data.base_model("rl/reference", given) if given else None
    policy = tasks.rl("rl", recipe.rl, start, prompts, reward_models, critic, pretraining, held_out, reference)
    evaluations = Evaluations(recipe, base, judge)
    before = "sft" if recipe.sft else "start"
    if recipe.evaluation:
        evaluations.add(before, start)
        evaluations.add("rl", policy)
    return Outputs(
        policy=policy,
        reward_model=judge,
        report=evaluations.report(),
        final="rl",
        baseline=before,
        evaluations=evaluations,
    )
