"""The command ``align run``: run a recipe in this process, and print its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from alignment.flows.console import RecipeArgument, StoreOption, SweepOption, out, print_json
from alignment_core.artifacts import Reference, open_store
from alignment_core.errors import AlignmentError, InfrastructureError, UserError
from alignment_core.imports import hidden, uncollected
from alignment_core.journal import RunRecord

NOT_PROMOTED = 4
"""Exit code of a completed run whose policy was not promoted."""
NOT_PUBLISHED = 5
"""Exit code of a run whose policy was promoted, but not published."""
GAVE_UP_ROWS = 6
"""Exit code of a completed night that gave up rows of earlier nights, after four failed attempts."""
PARTLY_FAILED = 7
"""Exit code of a run with failed and completed branches, such as variants of a sweep."""


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
    """Run a recipe on this machine, or on the Ray cluster of RAY_ADDRESS. Finished stages are not run again.

    A Python file, or a function in it (file.py:flow), is a Prefect flow of your own; --set sets its parameters.
    """
    from alignment.flows.cli.custom_flow import OF_RECIPES, is_flow_file

    if is_flow_file(recipe):
        if sweeps or store:
            raise UserError(OF_RECIPES.format("sweep" if sweeps else "store"))
        return run_flow_here(str(recipe), None, from_stage, None, as_json, tuple(overrides))
    from alignment.flows.shipped_recipes import file_of
    from alignment_core.recipes import load_recipe

    chosen = load_recipe(file_of(recipe), [*overrides, *([f"store={store}"] if store else [])], sweeps=sweeps)
    return run_here(chosen, from_stage, None, as_json, tuple(overrides))


def run_here(
    recipe: Any, from_stage: str | None, resumes: RunRecord | None, as_json: bool, overrides: tuple[str, ...]
) -> None:
    """Run a recipe in this process, and print its outcome."""
    _print_outcomes([run_recipe_here(recipe, from_stage, resumes, as_json, overrides)], as_json)


def _print_outcomes(outcomes: list[dict[str, Any]], as_json: bool) -> None:
    """Print the outcomes of runs, and exit with the code of one that was not promoted, or not published."""
    for outcome in outcomes:
        if as_json:
            print_json({"event": "result", **outcome})
        else:
            print_outcome(outcome)
    if any(outcome["given_up"] for outcome in outcomes):
        raise typer.Exit(GAVE_UP_ROWS)
    if any(outcome.get("failed") for outcome in outcomes):
        raise typer.Exit(PARTLY_FAILED)
    if any(map(not_promoted, outcomes)):
        raise typer.Exit(NOT_PROMOTED)
    if any(map(not_published, outcomes)):
        raise typer.Exit(NOT_PUBLISHED)


def run_recipe_here(
    recipe: Any, from_stage: str | None, resumes: RunRecord | None, as_json: bool, overrides: tuple[str, ...]
) -> dict[str, Any]:
    """Run a recipe in this process, and return its outcome. Without a Prefect server, the run starts one."""
    from alignment_core.tracking import require

    opened = open_store(recipe.store)  # raises for a store that cannot be used before Prefect starts
    from alignment.flows import preflight
    from alignment.flows.service import environment, services
    from alignment.flows.service.prefect_api import start_prefect_api

    require(recipe.tracking)
    services.use_if_running()
    environment.prepare()
    api = start_prefect_api()  # takes seconds, so it starts while the recipe is checked
    planned, host = preflight.check_and_start(recipe, opened, from_stage)

    def start() -> dict[str, Any]:
        from alignment.flows.recipe_flow import alignment

        outcome: dict[str, Any] = alignment(recipe, from_stage=from_stage)
        return outcome

    command_line = preflight.CommandLine(None, host, resumes, overrides, warnings=tuple(planned.warnings))
    with preflight.closing(host):
        return _displayed(start, api, command_line, as_json)


def run_flow_here(
    given: str,
    parameters: dict[str, Any] | None,
    from_stage: str | None,
    resumes: RunRecord | None,
    as_json: bool,
    overrides: tuple[str, ...] = (),
) -> None:
    """Run the user's own flow, ``file.py:name``, in this process, and print its outcome.

    Its parameters are ``parameters``, or its defaults changed by ``overrides``.
    """
    from alignment.flows import preflight
    from alignment.flows.cli.custom_flow import checked, load_flow, parameters_of
    from alignment.flows.service import environment, services
    from alignment.flows.service.prefect_api import start_prefect_api

    services.use_if_running()
    environment.prepare()
    api = start_prefect_api()
    flow = load_flow(given)
    called = checked(flow, parameters_of(flow, overrides) if parameters is None else parameters)
    chosen = from_stage or (resumes.from_stage if resumes else None)
    caller = preflight.CommandLine(None, None, None if from_stage else resumes, overrides, chosen)
    _displayed(lambda: flow(**called), api, caller, as_json)
    if not caller.outcomes and as_json:
        print_json({"event": "result", "status": "completed", "stages": []})
    _print_outcomes(caller.outcomes, as_json)


def not_promoted(outcome: dict[str, Any]) -> bool:
    """Whether a promotion was refused by a gate, or because the tag had moved."""
    judged = outcome["night"] or outcome["promotion"]
    return judged is not None and judged["state"] in ("refused", "conflict")


def not_published(outcome: dict[str, Any]) -> bool:
    """Whether the policy was promoted, but its publication failed."""
    publication = (outcome.get("promotion") or {}).get("publication")
    return publication is not None and publication["state"] == "failed"


def _displayed(start: Callable[[], Any], api: Any, caller: Any, as_json: bool) -> Any:
    with uncollected(), hidden("pandas"):  # Prefect imports it for tables in parameters
        import alignment.flows.recipe_flow  # noqa: F401
        from alignment.flows.access import lost_server
        from alignment.flows.cli.display import display_of
        from alignment.flows.preflight import COMMAND_LINE
        from alignment.flows.service.reconcile import mark_if_open

    with display_of(as_json) as display:
        token = COMMAND_LINE.set(replace(caller, display=display))
        try:
            if api is not None:
                api.wait()
            if caller.resumes is not None:
                mark_if_open(caller.resumes.run_id, "`align resume` continues it")
            return start()
        except Exception as error:
            if not isinstance(error, AlignmentError) and (sentence := lost_server(error)):
                raise InfrastructureError(sentence) from error
            raise
        finally:
            COMMAND_LINE.reset(token)


def print_outcome(outcome: dict[str, Any]) -> None:
    """Print the stages, metrics and outputs of a run."""
    from alignment.flows.cli.display import metric_table, result_table, stage_table, step_table, variant_table
    from alignment.flows.costs import promotion_line
    from alignment_core.execution.base import StageResult

    if outcome["night"]:
        from alignment_core.nights.ledger import Night, summary

        for night in (*outcome["given_up"], outcome["night"]):
            out.print(summary(Night.model_validate(night)), markup=False)
        if not outcome["stages"]:
            return
    stages = [StageResult.model_validate(stage) for stage in outcome["stages"]]
    out.print(stage_table(stages))
    if steps := step_table(stages):
        out.print(steps)
    for label, reason in outcome.get("failed", {}).items():
        out.print("[red]failed:[/] ", end="")
        out.print(f"{label}: {reason}", markup=False)
    metrics = outcome["metrics"]
    for branch, policies in metrics.get("comparisons", {}).items():
        out.print(result_table(policies, branch))
    if metrics.get("policies"):
        out.print(result_table(metrics["policies"]))
    if metrics.get("variants"):
        out.print(variant_table(metrics["metric"], metrics["variants"]))
    if shown := metric_table(metrics):
        out.print(shown)
    store = open_store(outcome["store"])
    for name, reference in outcome["outputs"].items():
        out.print(f"{name}: {reference}\n  {store.fetch(Reference.parse(reference))}")
    if outcome["report"]:
        out.print(f"report with curves, text and lineage: {outcome['report']}", markup=False)
    promotion = outcome.get("promotion")
    if promotion:
        out.print(promotion_line(promotion), markup=False)
