"""The command ``align plan``: what a recipe would cost on other hardware than this machine's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from alignment.flows.console import JsonOption, RecipeArgument, StoreOption, out, print_json
from alignment_core import journal
from alignment_core.artifacts import Store, open_store
from alignment_core.capacity.hardware import KINDS, Coefficients, hardware_of
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.capacity.architecture import Architecture
    from alignment_core.capacity.cluster import Cluster
    from alignment_core.capacity.estimate import Estimate
    from alignment_core.capacity.report import Capacity
    from alignment_core.capacity.workload import Work
    from alignment_core.recipes import BaseRecipe

NOT_ESTIMATED = "evaluations, reports and data sets are left out, and other work on the GPUs"


def plan(
    recipe: RecipeArgument,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 8,
    kind: Annotated[
        str, typer.Option("--kind", help=f"Kind of GPU: {', '.join(KINDS)}; or cpu, with --like.")
    ] = "h100",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="The model's config.json. Default: that of the recipe's model, from folder, store or Hub."
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", help="A run on such hardware, whose speed is taken instead of the datasheet's; with --kind cpu."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length of a prompt. Default: its maximum.")
    ] = None,
    completion_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length of a completion. Default: its maximum.")
    ] = None,
    row_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length of a training sequence. Default: its maximum.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Training rows, of stages that train on fixed rows.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour, in any currency.")] = None,
    overrides: Annotated[list[str], typer.Option("--set", help="path=value; may be repeated.")] = [],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory per GPU, seconds per step, GPU hours and money of a recipe on GPUs that need not be here.

    Exit code 1 if it does not fit; then the nearest placement that does is named.
    """
    from alignment.flows.shipped_recipes import file_of
    from alignment_core.capacity.report import capacity
    from alignment_core.capacity.workload import Lengths, work_of
    from alignment_core.recipes import load_recipe

    chosen = load_recipe(file_of(recipe), [*overrides, *([f"store={store}"] if store else [])])
    opened = open_store(chosen.store, writes=False)
    works = work_of(chosen, Lengths(prompt_tokens, completion_tokens, row_tokens, rows))
    cluster = replace(_cluster(chosen, opened, kind, gpus, config, like), others=_others(works, opened))
    if not works:
        raise UserError(
            f"{recipe}: no stage of `method: {chosen.method}` trains or samples, so there is nothing to estimate"
        )
    result = capacity(works, chosen.resources, cluster, price)
    if as_json:
        print_json(result.as_object())
    else:
        _print(result)
    if result.problems:
        raise typer.Exit(1)


def _cluster(recipe: BaseRecipe, store: Store, kind: str, gpus: int, config: Path | None, like: str | None) -> Cluster:
    from alignment_core.capacity.architecture import Architecture
    from alignment_core.capacity.cluster import Cluster
    from alignment_core.capacity.measured import CPU, coefficients_of

    if kind == "cpu" and like is None:
        raise UserError("--kind cpu: processors have no datasheet here; name a run on this machine by --like")
    hardware = CPU if kind == "cpu" else hardware_of(kind)
    model = Architecture.of(_shape(recipe, store, config))
    if like is None:
        return Cluster(hardware, gpus, model, Coefficients())
    record = journal.find(like)
    its_store = open_store(record.store, writes=False)
    keys = [line.made_by or line.key for line in journal.stages(record.run_id).values() if line.state == "run"]
    records = its_store.records.by_key(keys).values()

    def shape_of(reference: Any) -> dict[str, Any]:
        return dict(json.loads((its_store.fetch(reference) / "config.json").read_text()))

    return Cluster(hardware, gpus, model, coefficients_of(records, hardware, shape_of))


def _shape(recipe: BaseRecipe, store: Store, config: Path | None) -> dict[str, Any]:
    if config is not None:
        try:
            return dict(json.loads(config.expanduser().read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"--config {config}: cannot be read as JSON: {error}") from None
    if recipe.model.scratch is not None:
        return recipe.model.scratch.model_dump()
    from alignment_core.init.models import choose

    model = choose(str(recipe.model.name), store)
    if not model.shape:
        why = model.problem or "it has no config.json"
        raise UserError(f"model: the shape of {recipe.model.name} is unknown: {why}; give its config.json by --config")
    return dict(model.shape)


def _others(works: Iterable[Work], store: Store) -> dict[str, Architecture | None]:
    """The models beside the policy, by name, as far as their config.json can be read now; None if it does not give
    their size."""
    from alignment_core.capacity.architecture import Architecture
    from alignment_core.capacity.workload import models_of
    from alignment_core.init.models import choose

    architectures: dict[str, Architecture | None] = {}
    for name in {str(model.name) for model in models_of(works).values() if model.scratch is None}:
        with suppress(UserError):
            if shape := dict(choose(name, store).shape or {}):
                architectures[name] = None
                architectures[name] = Architecture.of(shape)
    return architectures


def _print(result: Capacity) -> None:
    cluster = result.cluster
    out.print(
        f"{cluster.model.parameters / 1e9:.2f}B parameters on {cluster.gpus} {cluster.hardware.name}, "
        f"of which {result.gpus} are used",
        markup=False,
    )
    for each in result.estimates:
        _print_stage(each)
        for note in each.notes:
            out.print(f"  {note}", style="dim", markup=False)
    for problem in result.problems:
        out.print(f"[red]does not fit:[/] {escape(problem)}")
    if result.alternative is not None:
        changes = ", ".join(f"{name}: {str(value).lower()}" for name, value in result.alternative.changes.items())
        out.print(f"\nThe nearest placement that fits has `resources: {{{changes}}}`:", markup=False)
        for each in result.alternative.estimates:
            _print_stage(each)
    elif result.problems:
        out.print(
            "no placement of up to four other values of `resources` fits: take more GPUs, or `lora`", markup=False
        )
    hours = result.gpu_hours
    if hours is not None and not result.problems:
        money = "" if result.price is None else f", {hours * result.price:,.2f} at {result.price:g} an hour"
        out.print(f"\n{(result.seconds or 0) / 3600:,.1f} h, {hours:,.1f} GPU hours{money}", markup=False)
    elif hours is None and not result.problems:
        out.print("\nGive --rows for the number of steps, GPU hours and money", markup=False)
    out.print(NOT_ESTIMATED, style="dim", markup=False)


def _print_stage(each: Estimate) -> None:
    if not each.seconds:
        return
    steps = "" if each.steps is None else f", {each.steps} steps, {each.total or 0:,.0f} s"
    out.print(f"\n{each.stage}: {_seconds(each.step)} s per step{steps}", markup=False)
    parts = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in each.seconds.items())
    tokens = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in each.tokens.items())
    out.print(f"  seconds: {parts}\n  a step has {tokens}", markup=False)
    table = Table("GPU of", "fullest in", "GB", "of", "", box=None)
    for peak in each.peaks:
        held = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in peak.parts.items())
        table.add_row(peak.where, peak.moment, f"{peak.size / 1e9:.1f}", f"{peak.capacity / 1e9:.1f}", held)
    if each.peaks:
        out.print(table)
    for role in each.roles:
        if role.host:
            out.print(
                f"  {role.name}: {role.host / 1e9:.1f} GB of CPU memory for each of {role.ranks} ranks", markup=False
            )


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
