"""Deployments of shipped recipes and of the user's own. ``python -m alignment.flows.deployments`` registers the shipped ones.

Their entrypoints are modules of this package, which a worker finds from any folder.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.filters import WorkPoolFilter
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

from alignment.flows import deployment_flows, run_queue
from alignment.flows.recipe_flow import PATHS_BEGIN
from alignment.flows.run_form import run_form
from alignment.flows.run_queue import FLOW
from alignment.flows.schedules import schedule
from alignment.flows.shipped_recipes import hidden, pool, shipped
from alignment_core.errors import UserError
from alignment_core.home import align_home
from alignment_core.recipes import BaseRecipe, parse_recipe

PAGE = 200


def flow_of(method: str) -> Flow[..., Any]:
    """The flow that runs recipes of a method."""
    flow: Flow[..., Any] = getattr(deployment_flows, deployment_flows.own_flow(method))
    return flow


def register_shipped(client: SyncPrefectClient) -> dict[str, str]:
    """Register the shipped recipes. Schedules of deployments that exist stay as the user left them.

    Returns the problems of recipes that cannot be registered, by name or file.
    """
    problems = hidden()
    for name, one in shipped().items():
        try:
            flow, cron = getattr(deployment_flows, one.function), one.cron()
        except Exception as error:  # a broken plug-in must not keep the others from being registered
            problems[name] = f"its recipe {one.path} does not load: {error}"
            continue
        schedules = [schedule(cron, "UTC")] if cron else []
        _register(client, name, _content(flow, {}, flow.description), None if _find(client, name) else schedules)
    return problems


def register_recipe(
    client: SyncPrefectClient, name: str, recipe: BaseRecipe, folder: Path, due: CronSchedule | None
) -> None:
    """Register a user's own recipe, or replace it; without ``due`` its schedule stays. Raises UserError.

    Relative paths in a run's form begin at ``folder``, that of the recipe's file. The file is not needed any more.
    """
    _refuse_shipped(name)
    parameters = {"recipe": recipe.model_dump(mode="json")}
    content = _content(flow_of(recipe.method), parameters, f"Recipe {recipe.name}")
    content["job_variables"]["env"][PATHS_BEGIN] = str(folder)
    _register(client, name, content, [due] if due else None)


def register_flow(
    client: SyncPrefectClient, name: str, flow: Flow[..., Any], parameters: dict[str, Any], due: CronSchedule | None
) -> None:
    """Register a user's own flow, or replace it: its runs read its file, and run in that file's folder. Raises UserError."""
    _refuse_shipped(name)
    folder, file = os.path.split(os.path.abspath(str(inspect.getsourcefile(flow.fn))))
    content = _content(flow, parameters, inspect.getdoc(flow.fn) or f"Flow {flow.name}")
    content["entrypoint"], content["path"] = f"{file}:{flow.fn.__name__}", folder
    content["pull_steps"] = [{"prefect.deployments.steps.set_working_directory": {"directory": folder}}]
    content["job_variables"]["working_dir"] = folder
    _register(client, name, content, [due] if due else None)


def _refuse_shipped(name: str) -> None:
    if name in shipped():
        raise UserError(f"--name {name}: a deployment of this name comes with the project; choose another one")


def _content(flow: Flow[..., Any], parameters: dict[str, Any], description: str | None) -> dict[str, Any]:
    """Fields of a deployment on the server."""
    chosen = pool()
    return {
        "parameters": parameters,
        "description": description,
        "entrypoint": f"{flow.fn.__module__}.{flow.fn.__name__}",
        "parameter_openapi_schema": form_of(flow),
        "enforce_parameter_schema": True,
        "work_pool_name": chosen["name"],
        "job_variables": {**chosen["job_variables"], "working_dir": str(align_home())},
        "pull_steps": [],
        "path": None,
    }


def _register(
    client: SyncPrefectClient, name: str, content: dict[str, Any], schedules: list[CronSchedule] | None
) -> None:
    deployment = _find(client, name)
    if deployment is None:
        planned = [DeploymentScheduleCreate(schedule=schedule) for schedule in schedules or []]
        client.create_deployment(client.create_flow_from_name(FLOW), name, schedules=planned, **content)
        return
    if schedules is not None:
        content["schedules"] = [DeploymentScheduleUpdate(schedule=schedule, active=True) for schedule in schedules]
    client.update_deployment(deployment.id, DeploymentUpdate(**content))


def form_of(flow: Flow[..., Any]) -> dict[str, Any]:
    """The run form of a flow. Its default recipe has only the fields that the file sets."""
    form = flow.parameters.model_dump()
    parameters = inspect.signature(flow.fn).parameters
    if "recipe" in parameters:
        form = run_form(form)
    for name, parameter in parameters.items():
        if isinstance(parameter.default, BaseRecipe):
            form["properties"][name]["default"] = parameter.default.model_dump(mode="json", exclude_unset=True)
    return form


def _find(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return None


def problems(client: SyncPrefectClient, pool: str) -> dict[str, str]:
    """Problems of deployments whose runs would fail at once, by name."""
    chosen = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    problems: dict[str, str] = {}
    offset = 0
    while page := client.read_deployments(work_pool_filter=chosen, limit=PAGE, offset=offset):
        problems |= {deployment.name: problem for deployment in page if (problem := _problem(deployment))}
        offset += PAGE
    return problems


def _problem(deployment: DeploymentResponse) -> str | None:
    entrypoint = deployment.entrypoint or ""
    file, colon, function = entrypoint.rpartition(":")
    if colon:
        return _problem_of_file(deployment, file, function)
    module, _, function = entrypoint.rpartition(".")
    recipe = (deployment.parameters or {}).get("recipe")
    try:
        if module == deployment_flows.__name__ and recipe:
            parse_recipe(recipe)
    except UserError as error:
        return f"its recipe is not valid any more: {error}"
    try:
        if not hasattr(importlib.import_module(module), function):
            return f"its entrypoint {entrypoint} does not exist"
    except Exception as error:
        return f"its entrypoint {entrypoint} does not load: {type(error).__name__}: {error}"
    folder = (deployment.job_variables or {}).get("working_dir")
    if folder and not Path(folder).is_dir():
        return f"its folder {folder} is gone"
    return None


def _problem_of_file(deployment: DeploymentResponse, file: str, function: str) -> str | None:
    """The problem of a deployment made from a file; None if its pull steps fetch the code, which cannot be checked here."""
    steps = deployment.pull_steps or []
    folders = [step[name]["directory"] for step in steps for name in step if name.endswith("set_working_directory")]
    if len(folders) != len(steps):
        return None
    path = Path(folders[-1] if folders else deployment.path or "/", file)
    try:
        if path.samefile(str(deployment_flows.__file__)):  # its flows are built on access
            return None if hasattr(deployment_flows, function) else f"its entrypoint {path}:{function} does not exist"
        statements = ast.parse(path.read_text()).body
        names = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
    except Exception as error:
        return f"its entrypoint {path}:{function} does not load: {error}"
    return None if function in names else f"its entrypoint {path}:{function} does not exist"


def create_pool(client: SyncPrefectClient, name: str, max_runs: int | None) -> int:
    """Create the pool unless it exists, and return its limit of concurrent runs. ``max_runs`` is the limit the user set."""
    template = ProcessWorker.get_default_base_job_template()
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
    return run_queue.set_limit(client, client.read_work_pool(name), max_runs)


def main() -> int:
    """Register the shipped deployments in the pool named on the command line; print its limit and the problems as JSON."""
    name = sys.argv[1]
    with get_client(sync_client=True) as client:
        max_runs = create_pool(client, name, run_queue.max_runs_from(os.environ.get(run_queue.VARIABLE)))
        print(json.dumps({"max_runs": max_runs, "problems": {**register_shipped(client), **problems(client, name)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
