"""A recipe's plan: its composition, with nothing submitted. Imports no Prefect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.checks.plan import Plan
from alignment_core.recipes import BaseRecipe
from flows import dpo, iterative_dpo, reward_model, rl, sft
from flows.outputs import Outputs
from tasks.graph import CURRENT

COMPOSITIONS: dict[str, Callable[[Any], Outputs]] = {
    "sft": sft.sft,
    "reward-model": reward_model.reward_model,
    "dpo": dpo.dpo,
    "iterative-dpo": iterative_dpo.iterative_dpo,
    "rl": rl.rl,
}
"""By method; a night is composed of more than its recipe."""


def plan(recipe: BaseRecipe, store: Store) -> Plan:
    """The stages that the recipe's composition asks for. Raises UserError where it cannot be composed."""
    composed = Plan(store, recipe.seed)
    token = CURRENT.set(composed)
    try:
        if compose := COMPOSITIONS.get(recipe.method):
            compose(recipe)
    finally:
        CURRENT.reset(token)
    return composed
