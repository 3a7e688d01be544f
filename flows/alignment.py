"""The deployments' flows, all named ``alignment``: the functions differ only in the recipe that their form asks for.

Each becomes a flow when somebody asks this module for it: making the forms of all takes longer than a cached stage.
"""

from __future__ import annotations

import os
from typing import Any

from prefect import Flow

from alignment_core.recipes import (
    DpoRecipe,
    IterativeDpoRecipe,
    NightlyRecipe,
    RewardModelRecipe,
    RlRecipe,
    SftRecipe,
    load_recipe,
)
from alignment_core.recipes.paths import each_text
from flows.any_recipe import alignment_flow, run_any
from flows.runs import project_file


def _shipped(name: str) -> Any:
    """A recipe whose paths begin at the project's folder, where its deployment runs; the form shows none of this machine."""
    path, project = project_file("deployments", "recipes", f"{name}.yaml"), project_file()
    recipe = load_recipe(path, working_folder=path.parent)  # whatever lies where this is imported

    def shown(text: str) -> str:
        return os.path.relpath(text, project) if text.startswith(f"{project}/") else text

    return type(recipe).model_validate(each_text(recipe.model_dump(mode="json", exclude_unset=True), shown))


def deployed_quickstart(
    recipe: IterativeDpoRecipe = _shipped("quickstart"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """SFT → reward model → two rounds of DPO with a small model on built-in tasks."""
    return run_any(recipe, overrides, from_stage)


def deployed_iterative_dpo(
    recipe: IterativeDpoRecipe = _shipped("iterative-dpo"),
    overrides: list[str] = [],
    from_stage: str | None = None,
) -> dict[str, Any]:
    """SFT → reward model → rounds of DPO → evaluation → promotion."""
    return run_any(recipe, overrides, from_stage)


def deployed_sft(
    recipe: SftRecipe = _shipped("sft"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """Supervised fine-tuning."""
    return run_any(recipe, overrides, from_stage)


def deployed_reward_model(
    recipe: RewardModelRecipe = _shipped("reward-model"),
    overrides: list[str] = [],
    from_stage: str | None = None,
) -> dict[str, Any]:
    """A reward model from preference pairs."""
    return run_any(recipe, overrides, from_stage)


def deployed_dpo(
    recipe: DpoRecipe = _shipped("dpo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """DPO on given pairs."""
    return run_any(recipe, overrides, from_stage)


def deployed_ppo(
    recipe: RlRecipe = _shipped("ppo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """PPO against a reward model."""
    return run_any(recipe, overrides, from_stage)


def deployed_grpo(
    recipe: RlRecipe = _shipped("grpo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """GRPO against a verifier."""
    return run_any(recipe, overrides, from_stage)


def deployed_reinforce_baseline(
    recipe: RlRecipe = _shipped("reinforce-baseline"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """REINFORCE++ with the mean of a prompt's completions as baseline."""
    return run_any(recipe, overrides, from_stage)


def deployed_agent(
    recipe: RlRecipe = _shipped("agent"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """GRPO of an agent whose turns an environment answers."""
    return run_any(recipe, overrides, from_stage)


def deployed_rlhf(
    recipe: RlRecipe = _shipped("rlhf"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """SFT → reward model → PPO."""
    return run_any(recipe, overrides, from_stage)


def deployed_nightly(
    recipe: NightlyRecipe = _shipped("nightly"),
    overrides: list[str] = [],
    from_stage: str | None = None,
    night: str | None = None,
) -> dict[str, Any]:
    """Production → new preference rows → evaluation → promotion. `night` names the night; default when the run was due."""
    return run_any(recipe, overrides, from_stage, night)


_FUNCTIONS = {name: globals().pop(name) for name in list(globals()) if name.startswith("deployed_")}


def __getattr__(name: str) -> Flow[..., Any]:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made: Flow[..., Any] = alignment_flow(_FUNCTIONS[name])
    globals()[name] = made
    return made
