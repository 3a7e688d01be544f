"""``align resume``: continue a run, here or with a worker."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, RunArgument, out, print_json
from alignment.flows.service import services
from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.errors import EnvironmentFault
from alignment_core.resolved_names import resolving


def resume(
    run: RunArgument,
    from_stage: Annotated[
        str | None, typer.Option(help="Run this stage and everything that depends on it again, even if cached.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a run where it stopped. Its old process is ended first if it is still alive."""
    record = journal.find(run)
    with resolving(record.resolved):
        _resume(record, from_stage, as_json)


def _resume(record: journal.RunRecord, from_stage: str | None, as_json: bool) -> None:
    if from_stage is not None and not record.flow:  # the stages of a user's own flow are known only when it runs
        _check_from_stage(record, from_stage)
    ended = journal.end_process(record, journal.stop_seconds(record))
    services.use_if_running()
    if record.deployed:
        return _resume_deployed(record, from_stage, ended, as_json)
    from alignment.flows.cli.run import run_flow_here, run_here
    from alignment_core.recipes import parse_recipe

    if record.flow:
        return run_flow_here(record.flow, record.parameters, from_stage, record, as_json)
    recipe = parse_recipe(record.recipe, f"the recipe of run {record.run_id}")
    chosen, resumes = from_stage or record.from_stage, None if from_stage else record
    return run_here(recipe, chosen, resumes, as_json, record.overrides)


def _check_from_stage(record: journal.RunRecord, from_stage: str) -> None:
    """Raise UserError for an unknown stage, before the old process is ended."""
    from alignment.flows.planning import plan
    from alignment.flows.preflight import check_from_stage
    from alignment_core.recipes import parse_recipe

    recipe = parse_recipe(record.recipe, f"the recipe of run {record.run_id}")
    planned = plan(recipe, open_store(record.store, writes=False))
    check_from_stage(from_stage, [stage.label for stage in planned.stages])


def _resume_deployed(record: journal.RunRecord, from_stage: str | None, ended: bool, as_json: bool) -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise EnvironmentFault("a worker ran this run; start the services (`align up`) or set PREFECT_API_URL first")
    from alignment.flows.service.reconcile import resume_now

    run_id = resume_now(record.run_id, from_stage, "its process was ended" if ended else "its process is gone")
    if as_json:
        return print_json({"run_id": run_id, "scheduled": True})
    return out.print(f"scheduled as run {run_id}; the worker picks it up, and finished stages are cached")
