"""A recipe's plan: its composition, with nothing submitted. Imports no Prefect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.checks.plan import Plan, PlannedStage
from alignment_core.execution.base import StageConfig
from alignment_core.recipes import BaseRecipe, NightlyRecipe
from flows import dpo, iterative_dpo, night, reward_model, rl, sft
from flows.comparison import compare
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
    """The stages that the recipe's composition and its promotion ask for. Raises UserError where it cannot be composed."""
    composed = Plan(store, recipe.seed)
    token = CURRENT.set(composed)
    try:
        if isinstance(recipe, NightlyRecipe):
            arriving = PlannedStage("the night's rows", "rows", StageConfig(), {}, "runs")
            night.compose(recipe, store.tag(recipe.promotion.tag), arriving, number=0)
        else:
            composed.not_promoted = compare(recipe, store, COMPOSITIONS[recipe.method](recipe)).problem
    finally:
        CURRENT.reset(token)
    return composed
