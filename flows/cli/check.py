"""The command ``align check``: the stages of a recipe and its problems, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from alignment.flows.console import JsonOption, RecipeArgument, StoreOption, SweepOption, out, print_json
from alignment_core.artifacts import open_store


def check(
    recipe: RecipeArgument,
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    sweeps: SweepOption = [],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe without running it: read the first rows, call your functions on a few of them, and list the stages.

    Exit code 2 if the recipe cannot run. Only the first rows are read; the run reports problems in later ones.
    """
    from alignment.flows.planning import plan
    from alignment.flows.shipped_recipes import file_of
    from alignment_core.checks import traps
    from alignment_core.checks.report import check as look
    from alignment_core.recipes import load_recipe
    from alignment_core.tracking import require

    chosen = load_recipe(file_of(recipe), [*overrides, *([f"store={store}"] if store else [])], sweeps=sweeps)
    require(chosen.tracking)
    planned = plan(chosen, open_store(chosen.store, writes=False))
    findings = look(planned, chosen.resources)
    findings.refuse()
    stages = [
        {"stage": stage.label, "state": stage.state, "waits_for": stage.waits_for() if stage.state == "depends" else []}
        for stage in planned.stages
    ]
    warnings = [*findings.warnings, *traps.warnings(chosen)]
    if as_json:
        data = [answer.model_dump(mode="json", exclude=NOT_SHOWN) for answer in findings.seen]
        caches = [need.model_dump() for need in findings.caches]
        result = {
            "stages": stages,
            "data": data,
            "kv_cache": caches,
            "warnings": warnings,
            "not_promoted": planned.not_promoted,
        }
        return print_json({"status": "checked", **result})
    table = Table("stage", "", box=None)
    for stage in stages:
        table.add_row(str(stage["stage"]), WORDS[str(stage["state"])] + ", ".join(stage["waits_for"]))
    out.print(table)
    for answer in findings.seen:
        dropped = "".join(f", {count} {reason}" for reason, count in sorted(answer.dropped.items()))
        dropped += f", {answer.shortened} shortened" if answer.shortened else ""
        out.print(f"{answer.label}: {answer.unseen or f'{answer.read} rows read{dropped}'}", markup=False)
        for warning in answer.warnings:
            out.print(f"[yellow]{answer.label}:[/] {escape(warning)}")
    for warning in warnings:
        out.print(f"[yellow]warning:[/] {escape(warning)}")
    if findings.caches:
        largest = max(findings.caches, key=lambda need: need.mib)
        out.print(largest.sentence(chosen.resources), markup=False)
    if planned.not_promoted:
        return out.print(f"[yellow]cannot be promoted:[/] {escape(planned.not_promoted)}")
    return out.print("no problem found")


NOT_SHOWN = {"samples", "problem", "lengths", "sequences"}
"""Of what was found of a data set."""
WORDS = {"cached": "cached", "runs": "runs", "depends": "is decided by "}
