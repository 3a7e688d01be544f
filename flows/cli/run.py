"""The command ``align run``: a recipe, run in this process, and what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from alignment.flows.console import RecipeArgument, StoreOption, SweepOption, out, print_json
from alignment_core.artifacts import Reference, open_store
from alignment_core.errors import AlignmentError, InfrastructureError
from alignment_core.imports import hidden, uncollected
from alignment_core.journal import RunRecord

NOT_PROMOTED = 4
"""Exit code of a run that is complete, but whose policy may not take the tag."""
NOT_PUBLISHED = 5
"""Exit code of a run whose policy has the tag, and is not where it was to be published."""


def run(
    recipe: RecipeArgument,
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    sweeps: SweepOption = [],
    from_stage: Annotated[
        str | None, typer.Option(help="Run this stage and everything that depends on it again, even if cached.")
    ] = None,
    store: StoreOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print each event as a JSON object on its own line; the last line is the outcome."),
    ] = False,
) -> None:
    """Run a recipe on this machine, or on the Ray cluster of RAY_ADDRESS. Finished stages are not run again."""
    from alignment.flows.shipped import file_of
    from alignment_core.recipes import load_recipe

    chosen = load_recipe(file_of(recipe), [*overrides, *([f"store={store}"] if store else [])], sweeps=sweeps)
    run_here(chosen, from_stage, None, as_json, tuple(overrides))


def run_here(
    recipe: Any, from_stage: str | None, resumes: RunRecord | None, as_json: bool, overrides: tuple[str, ...] = ()
) -> None:
    """Run a recipe in this process, and print what came of it."""
    outcome = run_recipe_here(recipe, from_stage, resumes, as_json, overrides)
    if as_json:
        print_json({"event": "result", **outcome})
    else:
        print_outcome(outcome)
    if not_promoted(outcome):
        raise typer.Exit(NOT_PROMOTED)
    if not_published(outcome):
        raise typer.Exit(NOT_PUBLISHED)


def run_recipe_here(
    recipe: Any, from_stage: str | None, resumes: RunRecord | None, as_json: bool, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run a recipe in this process, with a Prefect server of its own unless one runs; what came of it."""
    from alignment_core.tracking import require

    opened = open_store(recipe.store)  # a store that cannot be used is said before Prefect starts
    from alignment.flows import early
    from alignment.flows.service import environment, services
    from alignment.flows.service.prefect_api import start_prefect_api

    require(recipe.tracking)
    services.use_if_running()
    environment.prepare()
    api = start_prefect_api()  # takes seconds, so it starts while the recipe is checked
    host = early.early_host(recipe, early.check_recipe(recipe, opened))
    with early.closing(host):
        caller = early.CommandLine(None, host, resumes, overrides)
        return _run_flow(recipe, api, from_stage, caller, as_json)


def not_promoted(outcome: dict[str, Any]) -> bool:
    """Whether the run (or its night) was to promote its policy and did not: a gate refused, or the tag had moved."""
    judged = outcome["night"] or outcome["promotion"]
    return judged is not None and judged["state"] in ("refused", "conflict")


def not_published(outcome: dict[str, Any]) -> bool:
    """Whether the policy was promoted, and its publication failed."""
    publication = (outcome.get("promotion") or {}).get("publication")
    return publication is not None and publication["state"] == "failed"


def _run_flow(recipe: Any, api: Any, from_stage: str | None, caller: Any, as_json: bool) -> dict[str, Any]:
    with uncollected(), hidden("pandas"):  # Prefect imports it to know its tables as a task's parameters
        from alignment.flows.access import lost_server
        from alignment.flows.any_recipe import alignment
        from alignment.flows.cli.display import display_of
        from alignment.flows.early import COMMAND_LINE
        from alignment.flows.service.reconcile import mark_if_open

    with display_of(as_json) as display:
        token = COMMAND_LINE.set(replace(caller, display=display))
        try:
            if api is not None:
                api.wait()
            if caller.resumes is not None:
                mark_if_open(caller.resumes.run_id, "`align resume` continues it")
            outcome: dict[str, Any] = alignment(recipe, from_stage=from_stage)
            return outcome
        except Exception as error:
            if not isinstance(error, AlignmentError) and (sentence := lost_server(error)):
                raise InfrastructureError(sentence) from error
            raise
        finally:
            COMMAND_LINE.reset(token)


def print_outcome(outcome: dict[str, Any]) -> None:
    """Stages, metrics and outputs of a run, for people."""
    from alignment.flows.cli.display import result_table, stage_table, step_table, variant_table
    from alignment.flows.costs import promotion_line
    from alignment_core.execution.base import StageResult

    if outcome["night"]:
        from alignment_core.nights.ledger import Night, summary

        out.print(summary(Night.model_validate(outcome["night"])), markup=False)
        if not outcome["stages"]:
            return
    stages = [StageResult.model_validate(stage) for stage in outcome["stages"]]
    out.print(stage_table(stages))
    if steps := step_table(stages):
        out.print(steps)
    metrics = outcome["metrics"]
    if metrics.get("policies"):
        out.print(result_table(metrics["policies"]))
    if metrics.get("variants"):
        out.print(variant_table(metrics["metric"], metrics["variants"]))
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            out.print(f"{name}: {value:.4g}")
    store = open_store(outcome["store"])
    for name, reference in outcome["outputs"].items():
        out.print(f"{name}: {reference}\n  {store.fetch(Reference.parse(reference))}")
    if outcome["report"]:
        out.print(f"report with curves, text and lineage: {outcome['report']}", markup=False)
    promotion = outcome.get("promotion")
    if promotion:
        out.print(promotion_line(promotion), markup=False)
