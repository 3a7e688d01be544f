"""The command ``align init``: a recipe for your own model and rows, checked before you run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

SHOWN = 70
"""Characters of a value."""
PROBLEMS = UserError.exit_code


def init(
    data: Annotated[
        str | None, typer.Option(help="File, folder, glob or Hub name. Default: what lies in this folder.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub name, folder, or tag of the store; `scratch` is a new tiny one. Default: production, or a small one."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Method. Default: what the rows speak for.")] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Rows to measure on. Default: a split of the data, or some that are held out.")
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
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing, even at a terminal.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a recipe for your rows: guess columns, method and settings, then check it as `align check` does.

    Exit code 2 if nothing was written, or if the recipe cannot run yet.
    """
    if copied is not None:
        given = {"--data": data, "--model": model, "--method": method, "--eval-data": eval_data, "--column": column}
        given["--reward"] = reward
        return _copy(copied, [name for name, value in given.items() if value], output, force, as_json)
    from alignment_core.init.recipe import InitRequest, held_out_file, start

    with _plainly():
        check_output(output, force)
    asks = not (yes or as_json) and sys.stdin.isatty() and out.is_terminal
    wish = InitRequest(data or _found(asks), output, model, method, eval_data, _columns(column), reward)
    opened = open_store(store, writes=False)
    with err.status("", spinner="dots") as shown, _plainly():

        def ask(question: str, answers: Sequence[str]) -> str:
            if not asks:
                return answers[0]
            shown.stop()
            return _asked(question, answers)

        started = start(wish, opened, ask, shown.update)
    held_out = _write(started, output, held_out_file(output), force)
    problems, stages, dropped = _checked(output, opened, started)
    problems = [*started.problems, *problems]
    commands = [f"align check {output}", f"align run {output}"]
    if as_json:
        print_json(
            {
                "status": "problems" if problems else "written",
                "file": str(output),
                "held_out_file": held_out and str(held_out),
                **_told(started),
                "stages": stages,
                "warnings": [*started.warnings, *dropped],
                "problems": problems,
                "next": commands,
            }
        )
    else:
        _show(started, output, held_out, [*started.warnings, *dropped], problems, commands)
    if problems:
        raise typer.Exit(PROBLEMS)
    return None


@contextmanager
def _plainly() -> Iterator[None]:
    """What the system says of a path that somebody gave, as a sentence of ours."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(f"{error.filename or 'this machine'}: {error.strerror or error}") from None
    except RuntimeError as error:  # of a home folder that there is not, as in ~nobody/rows.jsonl
        if "home directory" not in str(error):
            raise
        raise UserError(f"a path begins with ~ and a name that no user has: {error}") from None


def _columns(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in given:
        role, separator, name = one.partition("=")
        if not (separator and role.strip() and name.strip()):
            raise UserError(f"--column {one}: write it as role=name, such as prompt=question")
        found[role.strip()] = name.strip()
    return found


def _found(asks: bool) -> str:
    """What is to be read in this folder, where nobody named it."""
    from alignment_core.init.rows import candidates

    found = candidates(Path.cwd())
    if not found:
        raise UserError(
            f"{Path.cwd()} has no JSONL, JSON, CSV, Parquet, Arrow or text file with rows: name yours with --data"
        )
    if len(found) == 1:
        return found[0]
    if asks:
        return _asked("which rows?", found)
    raise UserError(
        f"there are several files with rows: {', '.join(found)}: choose one with --data, or --data . for all"
    )


def _asked(question: str, answers: Sequence[str]) -> str:
    """One of the answers; the first where nothing is said."""
    listed = ", ".join(answers)
    while True:
        said = typer.prompt(f"{question} ({listed})", default=answers[0])
        if said in answers:
            return str(said)


def _write(started: InitResult, output: Path, held_out: Path, force: bool) -> Path | None:
    """Write the recipe, and the rows that are held out to a file beside it, if there are any: both or none."""
    for target in (output, held_out):
        if any(target.exists() and target.samefile(file) for file in started.rows.files):
            raise UserError(f"{target} holds the rows themselves: give another --output")
    if not started.held_out:
        write_file(output, started.text)
        return None
    check_output(held_out, force)
    existed = held_out.exists()
    rows = (json.dumps(row, default=str) + "\n" for row in started.held_out)
    write_file(held_out, "".join(rows))
    try:
        write_file(output, started.text)
    except EnvironmentFault:
        if not existed:
            held_out.unlink()
        raise
    return held_out


def _checked(output: Path, store: Store, started: InitResult) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """What `align check` finds: problems, stages, and what becomes of rows that do not fit."""
    from alignment.flows.planning import plan
    from alignment_core.checks.report import check as look
    from alignment_core.recipes import load_recipe

    if started.model.problem:  # nobody waits twice for a Hub that does not answer
        return [started.model.problem], [], []
    try:
        recipe = load_recipe(output)
        planned = plan(recipe, store)
        findings = look(planned, recipe.resources)
    except EnvironmentFault as error:
        return [str(error)], [], []
    except AlignmentError as error:
        return str(error).splitlines(), [], []
    stages = [{"stage": one.label, "state": one.state} for one in planned.stages]
    dropped = [
        f"{seen.label}: of {seen.read} rows, "
        + ", ".join(f"{n} {reason}" for reason, n in sorted(seen.dropped.items()))
        for seen in findings.seen
        if seen.dropped
    ]
    return findings.problems, stages, dropped


def _told(started: InitResult) -> dict[str, Any]:
    model = started.model
    return {
        "method": started.method,
        "why": started.why,
        "data": {"name": started.rows.named, "rows": started.rows.count, "all_counted": started.rows.whole},
        "columns": [{"column": name, "role": role or None, "first": value} for name, role, value in started.columns],
        "model": {"name": model.name, "why": model.why, "parameters": model.parameters, "context": model.context},
        "longest_row": started.lengths.longest or None,
        "recipe": started.recipe,
        "text": started.text,
    }


def _show(
    started: InitResult,
    output: Path,
    held_out: Path | None,
    warnings: list[str],
    problems: list[str],
    commands: list[str],
) -> None:
    out.print(f"{started.rows.named}: {started.rows.words}", markup=False)
    table = Table("column", "role", "in the first row", box=None)
    for name, role, value in started.columns:
        table.add_row(escape(name), escape(role or "not used"), escape(_short(value)))
    out.print(table)
    out.print(f"method [bold]{started.method}[/]: {escape(started.why)}")
    out.print(f"model [bold]{escape(started.model.name)}[/]: {escape(started.model.why)}")
    if held_out:
        out.print(f"{held_out}: {len(started.held_out)} rows that are held out to measure on", markup=False)
    for warning in warnings:
        err.print("[yellow]mind:[/] ", end="")
        err.print(warning, markup=False)
    for problem in problems:
        err.print("[red]to be mended:[/] ", end="")
        err.print(problem, markup=False)
    state = "it cannot run yet" if problems else "checked, no problem found"
    out.print(f"{output} is written: {state}. Next:", markup=False)
    for command in commands:
        out.print(f"  {command}", markup=False)


def _short(value: Any) -> str:
    said = " ".join(as_text(value).split())
    return said if len(said) <= SHOWN else f"{said[: SHOWN - 1]}…"


def _copy(name: str, unused: list[str], output: Path, force: bool, as_json: bool) -> None:
    from alignment.flows.shipped_recipes import file_of, shipped

    if unused:
        raise UserError(f"--from copies a recipe as it is: leave out {', '.join(unused)}, and edit the copy")
    check_output(output, force)
    known = shipped()
    path = known[name].path if name in known else file_of(Path(name))
    if name not in known:
        raise UserError(f"--from {path}: name a recipe that is installed: {', '.join(known)}")
    write_file(output, path.read_text())
    commands = [f"align check {output}", f"align run {output}"]
    if as_json:
        return print_json({"status": "written", "file": str(output), "from": str(path), "next": commands})
    out.print(f"{output} is a copy of {name}: {known[name].description.rstrip('.')}. Next:", markup=False)
    for command in commands:
        out.print(f"  {command}", markup=False)
    return None
