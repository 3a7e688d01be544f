"""SFT once → several methods from it, as branches of one graph → one table of their policies."""

from __future__ import annotations

from alignment.flows.evaluation import Evaluations
from alignment.flows.outputs import Outputs
from alignment.flows.start import base_and_start, reward_model
from alignment.tasks.branches import branch, sharing
from alignment_core.recipes.methods import method_of
from alignment_core.recipes.methods.comparison import ComparisonRecipe


def comparison(recipe: ComparisonRecipe) -> Outputs:
    """Compose the start, each branch by its method's own composition, and the evaluations of all."""
    baseline = "sft" if recipe.sft else "start"
    with sharing():
        base, start = base_and_start(recipe, recipe.sft)
        judge = reward_model(recipe, recipe.reward_model, base, start)
        policies = {baseline: start}
        for name, one in recipe.recipes.items():
            with branch(name):
                policies[name] = method_of(one).compose()(one).policy
        evaluations = Evaluations(recipe, base, judge)
        for label, policy in policies.items():
            evaluations.add(label, policy)
        report = evaluations.report()
    return Outputs(
        policy=policies[recipe.final],
        reward_model=judge,
        report=report,
        final=recipe.final,
        baseline=baseline,
        evaluations=evaluations,
    )
