"""The commands about deployments: deploy registers a recipe of one's own, watch follows a run to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from alignment_core.errors import EnvironmentFault
from flows import access, services
from flows.console import JsonOption, out, print_json


def deploy(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML); it is read now, and what is in it is kept.")],
    name: Annotated[str, typer.Option(help="Name of the deployment: `alignment/NAME`.")],
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    cron: Annotated[str | None, typer.Option(help="When to run it by itself, such as '0 2 * * *'.")] = None,
    timezone: Annotated[str, typer.Option(help="What --cron is meant in, such as Europe/Berlin.")] = "UTC",
    as_json: JsonOption = False,
) -> None:
    """Register a recipe as a deployment of the services' server, or replace it; without --cron its schedule stays."""
    from alignment_core.recipes import load_recipe

    chosen = load_recipe(recipe, overrides)
    services.use_if_running()
    if not os.environ.get(access.URL):
        raise EnvironmentFault("no services run; start them with `align up`, or name a server with PREFECT_API_URL")
    from prefect.client.orchestration import get_client

    from flows import deployments

    due = deployments.schedule(cron, timezone) if cron else None
    with get_client(sync_client=True) as client:
        deployments.register_recipe(client, name, chosen, due)
    if as_json:
        return print_json({"deployment": f"{deployments.FLOW}/{name}", "cron": cron})
    when = f"; it runs at {cron} ({timezone})" if cron else ""
    return out.print(f"registered{when}. Run it now: prefect deployment run {deployments.FLOW}/{name}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the commands to ``align``."""
    app.command()(deploy)
