"""``align generate``: a model's answers to a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from alignment.flows.cli.run import print_outcome, run_recipe_here
from alignment.flows.console import JsonOption, StoreOption, check_output, err, out, print_json, write_file
from alignment_core.artifacts import Reference, open_store

NO_LIMIT = 1 << 30
"""Context in tokens of a model whose configuration has none."""
READ_AS = tuple(f"generate.prompts.{field}" for field in ("columns", "format", "path", "sources", "prompt_template"))
"""Fields of the recipe that decide how rows are read."""


def generate(
    model: Annotated[str, typer.Argument(help="Reference or tag of the store, a folder, or a Hub name.")],
    prompts: Annotated[
        str, typer.Argument(help="File, folder, glob or Hub name of rows with prompts, as `align init` reads them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write.")],
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    overrides: Annotated[
        list[str], typer.Option("--set", help="Further fields of the recipe, path=value; may be repeated.")
    ] = [],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model's answers to a file of prompts. An interrupted command continues when it is repeated."""
    from alignment_core.recipes.load import apply_overrides, parse_recipe, set_field
    from alignment_core.recipes.paths import written

    check_output(output, overwrite, "--overwrite")
    here = Path.cwd()
    data, notes = _data(prompts, overrides)
    for note in notes:
        err.print(note, markup=False)
    content = written(
        {
            "method": "generate",
            "name": "generate",
            "model": model,
            "seed": seed,
            "generate": {
                "prompts": {**data, "shuffle": False},
                "generation": {
                    "num_generations": count,
                    "temperature": temperature,
                    "max_completion_length": max_tokens,
                },
            },
        },
        here,
        here,
    )
    sets = [*overrides, *([f"store={store}"] if store else [])]
    content = apply_overrides(content, sets, here)
    recipe: Any = parse_recipe(content, origin="align generate", refuse_unused=True)
    for field, tokens in limits_of(recipe).items():
        content = set_field(content, f"generate.prompts.{field}", tokens, "align generate")
    recipe = parse_recipe(content, origin="align generate", refuse_unused=True)
    outcome = run_recipe_here(recipe, None, None, as_json, tuple(overrides))
    left_out = _left_out(outcome)
    if left_out:
        err.print(f"[yellow]{escape(left_out_sentence(left_out, recipe))}[/]")
    folder = open_store(outcome["store"]).fetch(Reference.parse(outcome["outputs"]["rollouts"]))
    rows = list(_rows(folder))
    write_file(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if as_json:
        print_json({"event": "result", **outcome, "file": str(output), "rows": len(rows), "prompts_left_out": left_out})
    else:
        print_outcome(outcome)
        out.print(f"{len(rows)} answers in {output}", markup=False)


def _data(prompts: str, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The data section of the prompts, read as ``--set`` or else as `align init` reads it, and sentences about it."""
    from alignment_core.init.prompts import prompts_of, unread_prompts

    if any(override.startswith(READ_AS) for override in overrides):
        return unread_prompts(prompts), []
    return prompts_of(prompts)


def limits_of(recipe: Any) -> dict[str, int]:
    """The default limits of the prompts: the model's context, and the part of it that the longest answer leaves."""
    prompts, room = recipe.generate.prompts, recipe.generate.generation.max_completion_length
    if prompts.model_fields_set & {"max_length", "max_prompt_length"}:
        return {}
    context = _context(recipe)
    if context is None:
        return {"max_length": NO_LIMIT}
    return {"max_length": context, "max_prompt_length": max(1, context - room)}


def _context(recipe: Any) -> int | None:
    """The context of the model in tokens; None if its config.json has none."""
    from alignment_core.checks.shapes import model_shape
    from alignment_core.data.context import longest_sampled
    from alignment_core.recipes.paths import is_written_as_path
    from alignment_core.stages.base_model import BaseModelConfig, in_store, near_tags, pin_model

    store, model = open_store(recipe.store), recipe.model
    if known := in_store(store, model):
        file = store.fetch(known) / "config.json"
        return longest_sampled(json.loads(file.read_text())) if file.is_file() else None
    # a folder needs no digests of its files for that
    is_folder = model.name is not None and is_written_as_path(model.name)
    config = BaseModelConfig(model=model) if is_folder else pin_model(model, near_tags(store, model))
    return longest_sampled(model_shape(config))


def _left_out(outcome: dict[str, Any]) -> dict[str, int]:
    """The number of prompts without answers, by reason."""
    dropped = (stage["metrics"].get("dropped", {}) for stage in outcome["stages"] if stage["stage"] == "dataset")
    return dict(next(dropped, {}))


def left_out_sentence(left_out: dict[str, int], recipe: Any) -> str:
    """A sentence about prompts without answers."""
    from alignment_core.data.limits import REASONS

    count = sum(left_out.values())
    reasons = "; ".join(f"{number} {REASONS[reason]} ({reason})" for reason, number in sorted(left_out.items()))
    prompts = recipe.generate.prompts
    limits = {"max_length": prompts.max_length, "max_prompt_length": prompts.max_prompt_length}
    limits_in_words = ", ".join(
        f"{name} is {tokens}" for name, tokens in limits.items() if tokens and tokens < NO_LIMIT
    )
    return f"{count} prompt{'' if count == 1 else 's'} left out, without an answer: {reasons}" + (
        f"; {limits_in_words}" if limits_in_words else ""
    )


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each completion, in the order of the prompts."""
    from alignment_core.data.messages import as_given, tools_of
    from alignment_core.rollout.schemas import read_rollouts

    for row in read_rollouts(folder):
        kept = json.loads(row["columns"]) if row["columns"] else {}
        yield {
            "prompt": as_given(row) or row["prompt_text"],
            **({"tools": tools} if (tools := tools_of(row)) else {}),
            "completion": row["completion_text"],
            "finish_reason": row["finish_reason"],
            "sample": int(row["sample"]),
            "source": row["source"],
            **({"label": row["label"]} if row["label"] is not None else {}),
            **kept,
        }
