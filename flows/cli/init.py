"""The command ``align init``: a recipe for the user's rows and model, checked before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from alignment.flows.cli.samples import as_text
from alignment.flows.console import JsonOption, StoreOption, check_output, err, out, print_json, write_file
from alignment_core.artifacts import open_store
from alignment_core.errors import AlignmentError, EnvironmentFault, UserError

if TYPE_CHECKING:
    from alignment_core.artifacts import Store
    from alignment_core.init.recipe import InitResult

SHOWN_CHARACTERS = 70


def init(
    data: Annotated[
        str | None, typer.Option(help="File, folder, glob, address or Hub name. Default: the only file of rows here.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hub name, folder, tag of the store, or `scratch` for a new tiny one. Default: a small one."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Method. Default: by the kind of the rows.")] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Rows to measure on. Default: the test split, or some held-out rows.")
    ] = None,
    column: Annotated[
        list[str], typer.Option(help="role=name, to correct a guess, such as prompt=question; may be repeated.")
    ] = [],
    reward: Annotated[
        list[str],
        typer.Option(
            help="Reward function for `rl`, file.py:function or module:function; may be repeated, to be summed."
        ),
    ] = [],
    copied: Annotated[
        str | None, typer.Option("--from", help="Copy this installed recipe instead, such as iterative-dpo.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Recipe to write.")] = Path("recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask no question, even in a terminal.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a recipe for your rows: guess columns, method and settings, then check it as `align check` does.

    Exit code 2 if nothing was written, or if the recipe cannot run yet.
    """
    if copied is not None:
        options: dict[str, object] = {"--data": data, "--model": model, "--method": method, "--eval-data": eval_data}
        options |= {"--column": column, "--reward": reward}
        return _copy(copied, [name for name, value in options.items() if value], output, force, as_json)
    from alignment_core.init.held_out import held_out_file
    from alignment_core.init.recipe import InitRequest, draft

    opened = open_store(store, writes=False)
    with _os_errors_as_sentences():
        check_output(output, force)
        named = data or _file_of_rows(asks=not (yes or as_json) and sys.stdin.isatty() and out.is_terminal)
        request = InitRequest(named, output, model, method, eval_data, _columns(column), reward)
        with err.status("", spinner="dots") as spinner:
            result = draft(request, opened, spinner.update)
        held_out = _write(result, output, held_out_file(output), force)
    profile = result.profile
    problems, stages, dropped = _checked(output, opened, profile.model.problem)
    problems = [*result.problems, *problems]
    warnings = [*result.warnings, *dropped]
    if as_json:
        print_json(
            {
                "status": "problems" if problems else "written",
                "file": str(output),
                "held_out_file": held_out and str(held_out),
                "method": result.method,
                "why": result.why,
                "data": {"name": named, "rows": profile.rows.count, "all_counted": profile.rows.all_counted},
                "columns": [
                    {"column": name, "role": role or None, "first": value} for name, role, value in result.columns
                ],
                "model": {name: getattr(profile.model, name) for name in ("name", "why", "parameters", "context")},
                "longest_row": profile.lengths.longest,
                "recipe": result.recipe,
                "text": result.text,
                "stages": stages,
                "warnings": warnings,
                "problems": problems,
                "next": _next(output),
            }
        )
    else:
        _print(result, held_out, warnings, problems)
        state = "it cannot run yet" if problems else "checked, no problem found"
        out.print("\n  ".join([f"{output} is written: {state}. Next:", *_next(output)]), markup=False)
    if problems:
        raise typer.Exit(UserError.exit_code)
    return None


def _next(output: Path) -> list[str]:
    return [f"align check {output}", f"align run {output}"]


@contextmanager
def _os_errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{error.filename or 'this machine'}: {error.strerror or error}") from None
    except RuntimeError as error:  # from Path.expanduser, for ~nobody/rows.jsonl
        if "home directory" not in str(error):
            raise
        raise UserError(f"a path begins with ~ and a name that no user has: {error}") from None


def _columns(given: Sequence[str]) -> dict[str, str]:
    columns = {}
    for text in given:
        role, separator, name = (part.strip() for part in text.partition("="))
        if not (separator and role and name):
            raise UserError(f"--column {text}: write it as role=name, such as prompt=question")
        columns[role] = name
    return columns


def _file_of_rows(asks: bool) -> str:
    """The only file of rows in the working folder, or the user's choice."""
    from alignment_core.init.rows import candidates

    files = candidates(Path.cwd())
    if not files:
        raise UserError(
            f"{Path.cwd()} has no JSONL, JSON, CSV, Parquet, Arrow or text file with rows: name yours with --data"
        )
    listed = ", ".join(files)
    if len(files) > 1 and not asks:
        raise UserError(f"there are several files with rows: {listed}: choose one with --data, or --data . for all")
    chosen = files[0] if len(files) == 1 else ""
    while chosen not in (*files, "."):
        chosen = typer.prompt(f"which rows? ({listed}, or . for all)", default=files[0])
    return chosen


def _write(result: InitResult, output: Path, held_out: Path, force: bool) -> Path | None:
    """Write the recipe and the file of held-out rows, if there are any: both or none."""
    for target in (output, held_out):
        if any(target.exists() and target.samefile(file) for file in result.profile.rows.files):
            raise UserError(f"{target} holds the rows themselves: give another --output")
    rows = result.profile.held_out.rows
    if not rows:
        write_file(output, result.text)
        return None
    check_output(held_out, force)
    existed = held_out.exists()
    write_file(held_out, "".join(json.dumps(row, default=str) + "\n" for row in rows))
    try:
        write_file(output, result.text)
    except EnvironmentFault:
        if not existed:
            held_out.unlink()
        raise
    return held_out


def _checked(
    output: Path, store: Store, model_problem: str | None
) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """The findings of `align check`: problems, stages, and a sentence for each data set with dropped rows."""
    from alignment.flows.planning import plan
    from alignment_core.checks.report import check
    from alignment_core.recipes import load_recipe

    if model_problem:  # a Hub that does not answer is asked once
        return [model_problem], [], []
    try:
        recipe = load_recipe(output)
        planned = plan(recipe, store)
        findings = check(planned, recipe.resources)
    except AlignmentError as error:
        return str(error).splitlines(), [], []
    stages = [{"stage": stage.label, "state": stage.state} for stage in planned.stages]
    dropped = [
        f"{data.label}: of {data.read} rows, "
        + ", ".join(f"{count} {reason}" for reason, count in sorted(data.dropped.items()))
        for data in findings.seen
        if data.dropped
    ]
    return findings.problems, stages, dropped


def _print(result: InitResult, held_out: Path | None, warnings: list[str], problems: list[str]) -> None:
    rows, model = result.profile.rows, result.profile.model
    out.print(f"{rows.name}: {rows.count_in_words}", markup=False)
    table = Table("column", "role", "in the first row", box=None)
    for name, role, value in result.columns:
        text = " ".join(as_text(value).split())
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
        table.add_row(escape(name), escape(role or "not used"), escape(shown))
    out.print(table)
    out.print(f"method [bold]{result.method}[/]: {escape(result.why)}")
    out.print(f"model [bold]{escape(model.name)}[/]: {escape(model.why)}")
    if held_out:
        out.print(f"{held_out}: {len(result.profile.held_out.rows)} rows that are held out to measure on", markup=False)
    for warning in warnings:
        err.print(f"[yellow]warning:[/] {escape(warning)}")
    for problem in problems:
        err.print(f"[red]to be corrected:[/] {escape(problem)}")


def _copy(name: str, unused: list[str], output: Path, force: bool, as_json: bool) -> None:
    from alignment.flows.shipped_recipes import file_of, for_large_models, shipped

    if unused:
        raise UserError(f"--from copies a recipe as it is: leave out {', '.join(unused)}, and edit the copy")
    check_output(output, force)
    recipes = {**shipped(), **for_large_models()}
    if name not in recipes:
        raise UserError(f"--from {file_of(Path(name))}: name a recipe that is installed: {', '.join(recipes)}")
    source = recipes[name].path
    write_file(output, source.read_text())
    if as_json:
        return print_json({"status": "written", "file": str(output), "from": str(source), "next": _next(output)})
    title = f"{output} is a copy of {name}: {recipes[name].description.rstrip('.')}. Next:"
    return out.print("\n  ".join([title, *_next(output)]), markup=False)
