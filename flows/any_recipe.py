"""The flow ``alignment``: one recipe in, a report and promoted references out."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.task_runners import ThreadPoolTaskRunner

from alignment_core.recipes import BaseRecipe, NightlyRecipe, apply_overrides, parse_recipe
from flows import nightly
from flows.early import COMMAND_LINE
from flows.planning import COMPOSITIONS
from flows.runs import run_recipe

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


def run_any(recipe: BaseRecipe, overrides: list[str], from_stage: str | None, night: str | None = None) -> Any:
    """What every flow of this name does. `overrides` are `path=value`, as with `align run --set`; `night` names a night."""
    if overrides:
        recipe = parse_recipe(apply_overrides(recipe.model_dump(mode="json"), overrides))
    if isinstance(recipe, NightlyRecipe):
        return nightly.one_night(recipe, night, from_stage)
    return run_recipe(recipe, COMPOSITIONS[recipe.method], from_stage)


@alignment_flow
def alignment(recipe: BaseRecipe, from_stage: str | None = None) -> dict[str, Any]:
    """Run any recipe: the flow of `align run`. It runs `from_stage`, and what depends on it, again."""
    return run_any(recipe, [], from_stage)
