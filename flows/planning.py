"""The plan of a recipe: its composition, without running it. Imports no Prefect."""

from __future__ import annotations

from alignment.flows.comparison import compare
from alignment_core.artifacts import Store
from alignment_core.composition.graph import composing
from alignment_core.composition.plan import Plan
from alignment_core.credentials import variables
from alignment_core.execution.key import packages_named
from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.methods import method_of


def plan(recipe: BaseRecipe, store: Store) -> Plan:
    """The stages of the recipe's composition and of its promotion. Raises UserError if it cannot be composed."""
    accept = packages_named(recipe.reuse_across_versions, "reuse_across_versions")
    trust = recipe.model.trust_remote_code
    passed = recipe.resources.passed
    named = tuple(variables(recipe.model_dump(mode="json")))
    result = Plan(store, recipe.seed, accept=accept, trust_remote_code=trust, passed=passed, variables=named)
    with composing(result):
        result.not_promoted = compare(recipe, store, method_of(recipe).compose(recipe)).problem
    return result
