"""The flow ``alignment``: one recipe in, a report and promoted references out.

Every deployment is a flow of this name; the functions differ only in the recipe that their form asks for.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.task_runners import ThreadPoolTaskRunner

from alignment_core.recipes import (
    BaseRecipe,
    DpoRecipe,
    IterativeDpoRecipe,
    NightlyRecipe,
    Recipe,
    RewardModelRecipe,
    RlRecipe,
    SftRecipe,
    apply_overrides,
    load_recipe,
    parse_recipe,
)
from flows import nightly
from flows.early import COMMAND_LINE
from flows.planning import COMPOSITIONS
from flows.runs import project_file, run_recipe

# A waiting stage holds a thread; the machines themselves are handed out one stage at a time by the run host.
runner: Any = ThreadPoolTaskRunner(max_workers=64)
LONGEST_NAME = 160


def _run_name() -> str:
    """The recipe's name, and what its runs differ in: seed, overrides, night, and the stage from which it runs again."""
    context, caller = FlowRunContext.get(), COMMAND_LINE.get()
    parameters: dict[str, Any] = (context.parameters if context else None) or {}
    recipe: BaseRecipe = parameters["recipe"]
    overrides = [*parameters.get("overrides", ()), *(caller.overrides if caller else ())]
    seed = [] if any(one.startswith("seed=") for one in overrides) else [f"seed {recipe.seed}"]
    others = [f"{name} {value}" for name in ("night", "from_stage") if (value := parameters.get(name))]
    name = ", ".join([recipe.name, *seed, *overrides, *others])
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


alignment_flow = flow(name="alignment", task_runner=runner, flow_run_name=_run_name, validate_parameters=True)


def _run(recipe: BaseRecipe, overrides: list[str], from_stage: str | None, night: str | None = None) -> Any:
    if overrides:
        recipe = parse_recipe(apply_overrides(recipe.model_dump(mode="json"), overrides))
    if isinstance(recipe, NightlyRecipe):
        return nightly.one_night(recipe, night, from_stage)
    return run_recipe(recipe, COMPOSITIONS[recipe.method], from_stage)


def _shipped(name: str) -> Any:
    return load_recipe(project_file("deployments", "recipes", f"{name}.yaml"))


@alignment_flow
def alignment(recipe: Recipe, overrides: list[str] = [], from_stage: str | None = None) -> dict[str, Any]:
    """Run any recipe; `overrides` are `path=value`, as with `align run --set`; `from_stage` runs again from there."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_quickstart(
    recipe: IterativeDpoRecipe = _shipped("quickstart"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """SFT → reward model → two rounds of DPO with a small model on built-in tasks."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_iterative_dpo(
    recipe: IterativeDpoRecipe = _shipped("iterative-dpo"),
    overrides: list[str] = [],
    from_stage: str | None = None,
) -> dict[str, Any]:
    """SFT → reward model → rounds of DPO → evaluation → promotion."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_sft(
    recipe: SftRecipe = _shipped("sft"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """Supervised fine-tuning."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_reward_model(
    recipe: RewardModelRecipe = _shipped("reward-model"),
    overrides: list[str] = [],
    from_stage: str | None = None,
) -> dict[str, Any]:
    """A reward model from preference pairs."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_dpo(
    recipe: DpoRecipe = _shipped("dpo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """DPO on given pairs."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_ppo(
    recipe: RlRecipe = _shipped("ppo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """PPO against a reward model."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_grpo(
    recipe: RlRecipe = _shipped("grpo"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """GRPO against a verifier."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_reinforce_baseline(
    recipe: RlRecipe = _shipped("reinforce-baseline"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """REINFORCE++ with the mean of a prompt's completions as baseline."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_agent(
    recipe: RlRecipe = _shipped("agent"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """GRPO of an agent whose turns an environment answers."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_rlhf(
    recipe: RlRecipe = _shipped("rlhf"), overrides: list[str] = [], from_stage: str | None = None
) -> dict[str, Any]:
    """SFT → reward model → PPO."""
    return _run(recipe, overrides, from_stage)


@alignment_flow
def deployed_nightly(
    recipe: NightlyRecipe = _shipped("nightly"),
    overrides: list[str] = [],
    from_stage: str | None = None,
    night: str | None = None,
) -> dict[str, Any]:
    """Production → new preference rows → evaluation → promotion. `night` names the night; default when the run was due."""
    return _run(recipe, overrides, from_stage, night)
