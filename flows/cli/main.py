"""The ``align`` command: parses, calls, prints.

Exit codes: 0 done, 1 a run failed, 2 wrong input, 3 wrong environment, 4 not promoted (a gate refused, or another run
moved the tag first), 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from alignment_core.artifacts import Reference, open_store
from alignment_core.errors import AlignmentError, EnvironmentFault, InfrastructureError, UserError
from alignment_core.imports import hidden, uncollected
from alignment_core.journal import RunRecord
from flows.cli import check as cli_check
from flows.cli import deploy as cli_deploy
from flows.cli import doctor as cli_doctor
from flows.cli import fields as cli_fields
from flows.cli import samples as cli_samples
from flows.cli import services as cli_services
from flows.cli import store as cli_store
from flows.console import StoreOption, Unbroken, err, out, print_json

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM, as shells have them."""
NOT_PROMOTED = 4
"""Exit code of a run that is complete, but whose policy may not take the tag."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_store.artifacts_app, name="artifacts")
app.add_typer(cli_store.tags_app, name="tags")
for command in (cli_store.promote, cli_store.rollback, cli_store.lineage, cli_store.diff, cli_doctor.doctor):
    app.command()(command)
app.command()(cli_check.check)
app.command()(cli_fields.fields)
cli_services.register(app)
app.command()(cli_samples.samples)
cli_deploy.register(app)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML).")],
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    from_stage: Annotated[
        str | None, typer.Option(help="Run this stage and all that depends on it again, although they are known.")
    ] = None,
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as a JSON object on a line, and the outcome as the last.")
    ] = False,
) -> None:
    """Run a recipe on this machine, or on the Ray cluster of RAY_ADDRESS. Finished stages are not run again."""
    from alignment_core.recipes import load_recipe

    chosen = load_recipe(recipe, [*overrides, *([f"store={store}"] if store else [])])
    run_here(chosen, from_stage, None, as_json, tuple(overrides))


def run_here(
    recipe: Any, from_stage: str | None, resumes: RunRecord | None, as_json: bool, overrides: tuple[str, ...] = ()
) -> None:
    """Run a recipe in this process, with a Prefect server of its own unless one runs, and print what came of it."""
    from alignment_core.tracking import require

    opened = open_store(recipe.store)  # a store that cannot be used is said before Prefect starts
    from flows import early
    from flows.service import environment, services
    from flows.service.prefect_api import start_prefect_api

    require(recipe.tracking)
    services.use_if_running()
    environment.prepare()
    api = start_prefect_api()  # takes seconds, so it starts while the recipe is checked
    host = early.early_host(recipe, early.check_recipe(recipe, opened))
    with early.closing(host):
        caller = early.CommandLine(None, host, resumes, overrides)
        outcome = _run_flow(recipe, api, from_stage, caller, as_json)
    if as_json:
        print_json({"event": "result", **outcome})
    else:
        _print_outcome(outcome)
    if not_promoted(outcome):
        raise typer.Exit(NOT_PROMOTED)


def not_promoted(outcome: dict[str, Any]) -> bool:
    """Whether the run (or its night) was to promote its policy and did not: a gate refused, or the tag had moved."""
    judged = outcome["night"] or outcome["promotion"]
    return judged is not None and judged["state"] in ("refused", "conflict")


def _run_flow(recipe: Any, api: Any, from_stage: str | None, caller: Any, as_json: bool) -> dict[str, Any]:
    with uncollected(), hidden("pandas"):  # Prefect imports it to know its tables as a task's parameters
        from flows.any_recipe import alignment
        from flows.cli.display import display_of
        from flows.early import COMMAND_LINE
        from flows.service.access import lost_server
        from flows.service.reconcile import mark_if_open

    with display_of(as_json) as display:
        token = COMMAND_LINE.set(replace(caller, display=display))
        try:
            if api is not None:
                api.wait()
            if caller.resumes is not None:
                mark_if_open(caller.resumes.run_id, "`align resume` takes it up again")
            outcome: dict[str, Any] = alignment(recipe, from_stage=from_stage)
            return outcome
        except Exception as error:
            if not isinstance(error, AlignmentError) and (sentence := lost_server(error)):
                raise InfrastructureError(sentence) from error
            raise
        finally:
            COMMAND_LINE.reset(token)


def _print_outcome(outcome: dict[str, Any]) -> None:
    from alignment_core.execution.base import StageResult
    from flows.cli.display import promotion_line, result_table, stage_table, step_table

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


@contextmanager
def _errors_as_sentences(as_json: bool) -> Iterator[None]:
    try:
        yield
    except AlignmentError as error:
        _fail(str(error), error.exit_code, as_json)
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("ALIGN_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (ALIGN_DEBUG=1 shows where)", 1, as_json)
    except SystemExit as end:
        if end.code not in (INTERRUPTED, TERMINATED):  # the former is typer's answer to Ctrl-C
            raise
        _fail(_how_to_go_on(sys.argv[1:]), end.code, as_json)


@contextmanager
def _nothing_lost() -> Iterator[None]:
    """A command that only shows something has failed where that could not be written; a run has not."""
    try:
        yield
    except SystemExit as end:
        lost = getattr(sys.stdout, "lost", None)
        if lost and not end.code and sys.argv[1:2] not in (["run"], ["resume"]):
            raise EnvironmentFault(f"standard output took no more: {lost.strerror}") from None
        raise


def _how_to_go_on(arguments: list[str]) -> str:
    """What to say to somebody who pressed Ctrl-C, or ended the process."""
    if arguments[:1] not in (["run"], ["resume"]):
        return "nothing was left half done"
    return "finished stages are kept; `align resume last`, or the same command again, goes on where it stopped"


def _fail(message: str, code: int, as_json: bool) -> None:
    kinds = {
        UserError.exit_code: "wrong input",
        EnvironmentFault.exit_code: "wrong environment",
        INTERRUPTED: "interrupted",
        TERMINATED: "terminated",
    }
    kind = kinds.get(code, "failed")
    if as_json:
        print_json(
            {
                "status": "interrupted" if code in (INTERRUPTED, TERMINATED) else "failed",
                "error": message,
                "exit_code": code,
            }
        )
    err.print(f"[red]{kind}:[/] ", end="")
    err.print(message, markup=False)
    raise SystemExit(code)


def _terminated(*_: object) -> None:
    """End as Ctrl-C does: what was started is closed, and the last line says how to go on."""
    raise SystemExit(TERMINATED)


def main() -> None:
    """Entry point of the ``align`` command."""
    signal.signal(signal.SIGTERM, _terminated)
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None where it is closed
            setattr(sys, name, Unbroken(stream))
    with _errors_as_sentences("--json" in sys.argv), _nothing_lost():
        app()


if __name__ == "__main__":
    main()
