"""The flow ``alignment``: one recipe in, a report and promoted references out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.task_runners import ThreadPoolTaskRunner

from alignment.flows.preflight import COMMAND_LINE
from alignment.flows.runs import run_recipe
from alignment_core.recipes import BaseRecipe, apply_overrides, parse_recipe
from alignment_core.recipes.methods import method_of
from alignment_core.recipes.paths import written

# A waiting stage holds a thread. The run host gives the machines to one stage at a time.
runner: Any = ThreadPoolTaskRunner(max_workers=64)
LONGEST_NAME = 160
PATHS_BEGIN = "ALIGN_PATHS_BEGIN"
"""Environment variable with the folder at which relative paths in a deployment's form begin."""


def _run_name() -> str:
    """The name of a run: the recipe's name, seed, overrides and other parameters of the form."""
    context, caller = FlowRunContext.get(), COMMAND_LINE.get()
    parameters: dict[str, Any] = (context.parameters if context else None) or {}
    recipe: BaseRecipe = parameters["recipe"]
    overrides = [*parameters.get("overrides", ()), *(caller.overrides if caller else ())]
    seed = [] if any(override.startswith("seed=") for override in overrides) else [f"seed {recipe.seed}"]
    more = sorted(parameters.keys() - {"recipe", "overrides", "from_stage"})
    others = [f"{name} {value}" for name in (*more, "from_stage") if (value := parameters.get(name))]
    name = ", ".join([recipe.name, *seed, *overrides, *others])
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


alignment_flow = flow(name="alignment", task_runner=runner, flow_run_name=_run_name, validate_parameters=True)


def run_any(recipe: BaseRecipe, overrides: list[str], from_stage: str | None, **more: Any) -> Any:
    """Run a deployment. `overrides` are `path=value`, as with `align run --set`; `more` is for the method's own `run`.

    Relative paths begin at the folder that the deployment names, by default the working folder. With such a folder, the paths
    of the recipe became absolute when it was deployed, so other texts that could be paths are names.
    """
    named = os.environ.get(PATHS_BEGIN)
    folder = Path(named or Path.cwd())
    given = recipe.model_dump(mode="json", exclude_unset=True)  # overrides change also the defaults that depend on them
    content = written(given, folder, decided=bool(named))
    content = apply_overrides(content, overrides, folder)
    return _run(parse_recipe(content, refuse_unused=True), from_stage, **more)


def _run(recipe: BaseRecipe, from_stage: str | None, **more: Any) -> Any:
    method = method_of(recipe)
    if run := method.runner():
        return run(recipe, from_stage, **more)
    return run_recipe(recipe, method.compose, from_stage)


@alignment_flow
def alignment(recipe: BaseRecipe, from_stage: str | None = None) -> dict[str, Any]:
    """Run any recipe: the flow of `align run`. `from_stage` and its dependants run again."""
    return _run(recipe, from_stage)
