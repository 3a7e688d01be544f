"""SFT → process reward model, and an outcome reward model beside it → the best of n answers by each."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start, reward_model
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import process_reward
from alignment_core.recipes.methods.process_reward_model import ProcessRewardModelRecipe
from alignment_core.rewards.base import kind_of


def process_reward_model(recipe: ProcessRewardModelRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    outcome = reward_model(recipe, recipe.reward_model, base, start)
    judge = process_reward.process_reward_model("process-reward-model", recipe.process_reward_model, start, base)
    evaluations = Evaluations(recipe, base, outcome, judge)
    if recipe.evaluation:
        label = "sft" if recipe.sft else "start"
        evaluations.add(label, start)
        names = [kind_of(reward).who(reward).removeprefix("the ") for reward in recipe.evaluation.rewards]
        best = f"{label}/evaluation/best-of-n"
        process_reward.best_of_n(best, names, recipe.evaluation.confidence, evaluations.scores[label])
    return Outputs(reward_model=judge, report=evaluations.report(), evaluations=evaluations)
