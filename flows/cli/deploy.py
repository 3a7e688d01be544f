"""The commands about deployments: list the installed ones, deploy a recipe, watch a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.markup import escape

from alignment.flows import access, run_queue
from alignment.flows.cli.custom_flow import OF_RECIPES, checked, is_flow_file, load_flow, parameters_of
from alignment.flows.console import JsonOption, RecipeArgument, RunArgument, SweepOption, err, out, print_json
from alignment.flows.service import services
from alignment_core import journal
from alignment_core.errors import EnvironmentFault, UserError


def deploy(
    recipe: RecipeArgument,
    name: Annotated[str, typer.Option(help="Name of the deployment: `alignment/NAME`.")],
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    sweeps: SweepOption = [],
    cron: Annotated[str | None, typer.Option(help="Cron schedule, such as '0 2 * * *'.")] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Time zone of --cron, such as Europe/Berlin. Default: UTC.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Register a recipe as a deployment, or replace the deployment.

    The recipe is stored as it is now. Without --cron the schedule stays. A Python file, or a function in it (file.py:flow), is
    a Prefect flow of your own, which every run loads anew; --set sets its parameters.
    """
    if timezone is not None and cron is None:
        raise UserError("--timezone needs --cron")
    services.use_if_running()  # before loading a flow's file imports Prefect
    register = _flow_of(recipe, overrides, sweeps) if is_flow_file(recipe) else _recipe_of(recipe, overrides, sweeps)
    if not os.environ.get(access.URL):
        raise EnvironmentFault(
            "no services are running; start them with `align up`, or name a server with PREFECT_API_URL"
        )
    from prefect.client.orchestration import get_client

    from alignment.flows.schedules import clock_changes, next_run, schedule

    cron_schedule = schedule(cron, timezone or "UTC") if cron is not None else None
    with get_client(sync_client=True) as client:
        register(client, name, cron_schedule)
    warnings = clock_changes(cron_schedule, datetime.now(UTC)) if cron_schedule else []
    first = next_run(cron_schedule) if cron_schedule else None
    if as_json:
        data = {"cron": cron, "next_run": first and first.isoformat(), "warnings": warnings}
        return print_json({"deployment": f"{run_queue.FLOW}/{name}", **data})
    for warning in warnings:
        out.print(f"[yellow]--cron {escape(str(cron))}:[/] {escape(warning)}")
    when = f"; it runs at {cron} ({timezone or 'UTC'}), next on {first:%Y-%m-%d at %H:%M %z}" if first else ""
    return out.print(f"registered{when}. Run it now: prefect deployment run {run_queue.FLOW}/{name}", markup=False)


def _recipe_of(given: Path, overrides: list[str], sweeps: list[str]) -> Callable[..., None]:
    """Load a recipe, and return the function that registers it."""
    from alignment.flows.shipped_recipes import file_of
    from alignment_core.recipes import folder_of, load_recipe

    file = file_of(given)
    chosen = load_recipe(file, overrides, sweeps=sweeps)

    def register(client: Any, name: str, due: Any) -> None:
        from alignment.flows.deployments import register_recipe

        register_recipe(client, name, chosen, folder_of(file), due)

    return register


def _flow_of(given: Path, overrides: list[str], sweeps: list[str]) -> Callable[..., None]:
    """Load the user's own flow and check its parameters, and return the function that registers it."""
    if sweeps:
        raise UserError(OF_RECIPES.format("sweep"))
    flow = load_flow(str(given))
    parameters = parameters_of(flow, tuple(overrides))
    checked(flow, parameters)

    def register(client: Any, name: str, due: Any) -> None:
        from alignment.flows.deployments import register_flow

        register_flow(client, name, flow, parameters, due)

    return register


def deployments(
    distribution: Annotated[
        str | None, typer.Argument(help="Only those of this installed distribution. Default: all.")
    ] = None,
    as_prefect_yaml: Annotated[
        bool, typer.Option("--prefect-yaml", help="Print them as a `prefect.yaml` for `prefect deploy --all`.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the installed recipes, of this project and of plug-ins; `align up` registers each as a deployment.

    With --prefect-yaml and no distribution, only those of the project.
    """
    from rich.table import Table

    from alignment.flows import shipped_recipes

    if as_prefect_yaml:
        return print(shipped_recipes.prefect_yaml(distribution or shipped_recipes.OURS), end="")
    recipes = shipped_recipes.shipped(distribution).values()
    if as_json:
        return print_json(
            {recipe.name: {"recipe": str(recipe.path), "distribution": recipe.distribution} for recipe in recipes}
        )
    table = Table("deployment", "recipe", "distribution", box=None)
    for recipe in recipes:
        table.add_row(f"alignment/{recipe.name}", os.path.relpath(recipe.path), recipe.distribution)
    return out.print(table)


def watch(run: RunArgument, as_json: JsonOption = False) -> None:
    """Follow a run to its end, across crashes and resumptions. Exit code 1 if it does not complete."""
    from alignment.flows.service.follow import follow, last

    try:
        run_id = str(UUID(run))  # a scheduled run has no journal yet
    except ValueError:
        run_id = last() if run == journal.LAST else journal.find(run).run_id
    ending = follow(run_id, lambda line: err.print(f"{datetime.now():%H:%M:%S}  {line}", markup=False))
    if as_json:
        print_json(ending.model_dump())
    else:
        reason = f": {ending.message}" if ending.message else ""
        out.print(f"run {run_id}: {ending.status}{reason if ending.status != 'completed' else ''}", markup=False)
    if ending.status != "completed":
        raise typer.Exit(1)
