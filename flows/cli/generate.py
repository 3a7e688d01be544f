"""``align generate``: answers of a model to a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from alignment.flows.cli.run import print_outcome, run_recipe_here
from alignment.flows.console import JsonOption, StoreOption, out, print_json, write_file
from alignment_core.artifacts import Reference, open_store
from alignment_core.errors import UserError


def generate(
    model: Annotated[str, typer.Argument(help="Reference or tag of the store, a folder, or a Hub name.")],
    prompts: Annotated[Path, typer.Argument(help="JSONL, Parquet or CSV file with a column `prompt` or `messages`.")],
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
    """Answer prompts with a model. The same command goes on where an earlier one was ended, and gives the same answers."""
    from alignment_core.recipes.load import apply_overrides, parse_recipe
    from alignment_core.recipes.paths import written

    if output.is_dir() or (output.exists() and not overwrite):
        raise UserError(f"{output} is there already: give another --output, or --overwrite")
    if not output.absolute().parent.is_dir():
        raise UserError(f"{output.absolute().parent}: no such folder")
    here = Path.cwd()
    content = written(
        {
            "method": "generate",
            "name": "generate",
            "model": model,
            "seed": seed,
            "generate": {
                "prompts": {"path": str(prompts.expanduser().absolute()), "shuffle": False},
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
    recipe = parse_recipe(apply_overrides(content, sets, here), origin="align generate", refuse_unused=True)
    outcome = run_recipe_here(recipe, None, None, as_json, tuple(overrides))
    folder = open_store(outcome["store"]).fetch(Reference.parse(outcome["outputs"]["rollouts"]))
    rows = list(_rows(folder))
    write_file(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if as_json:
        print_json({"event": "result", **outcome, "file": str(output), "rows": len(rows)})
    else:
        print_outcome(outcome)
        out.print(f"{len(rows)} answers in {output}", markup=False)


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row of the file for each completion, in the order of the prompts."""
    from alignment_core.data.messages import as_given, tools_of
    from alignment_core.rollout.records import read_rollouts

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
