"""SFT once → several methods from it, as branches of one graph → one table of their policies."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start, reward_model
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks.branches import Branch, branch, sharing
from alignment.tasks.graph import BranchFailed, failure
from alignment_core.recipes.methods import method_of
from alignment_core.recipes.methods.comparison import ComparisonRecipe


def comparison(recipe: ComparisonRecipe) -> Outputs:
    """Compose the start, each branch by its method's own composition, and the evaluations of those that do not fail.

    Raises the failure of the first branch if all fail. If that of the run's policy fails, the run has none.
    """
    baseline = "sft" if recipe.sft else "start"
    with sharing():
        base, start = base_and_start(recipe, recipe.sft)
        judge = reward_model(recipe, recipe.reward_model, base, start)
        policies = {baseline: start}
        branches: dict[str, Branch] = {}
        failed: dict[str, BranchFailed] = {}
        for name, one in recipe.recipes.items():
            with branch(name) as branches[name]:
                try:
                    policies[name] = method_of(one).compose()(one).policy
                except BranchFailed as error:  # a composition that waits for its stages
                    failed[name] = error
        evaluations = Evaluations(recipe, base, judge)
        for label, policy in policies.items():
            evaluations.add(label, policy)
        failed |= {name: problem for name, one in branches.items() if (problem := failure(one.asked.values()))}
        failed |= evaluations.leave_out_failed()
        if branches.keys() <= failed.keys():
            raise next(iter(failed.values()))
        report = evaluations.report()
    return Outputs(
        policy=None if recipe.final in failed else policies[recipe.final],
        reward_model=judge,
        report=report,
        final=recipe.final,
        baseline=baseline,
        evaluations=evaluations,
    )
