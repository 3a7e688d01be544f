"""The command ``align migrate``: convert an OpenRLHF or TRL command line, or a TRL script, to a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from alignment.flows.console import JsonOption, check_output, err, out, print_json, write_file
from alignment_core.errors import UserError


def migrate(
    command: Annotated[
        str,
        typer.Argument(help="Command in quotes, shell script, Python script that uses TRL, or - for standard input."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="YAML file to write. Default: print it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert an OpenRLHF or TRL command line to a recipe, and list how each flag was converted.

    The launcher in front (deepspeed, torchrun, accelerate, ray job submit, …) may stay. A Python script is parsed, not run;
    lines that cannot be read are listed.
    """
    from alignment_core import migrate

    if output is not None:
        check_output(output, force)
    target = output.absolute().parent if output is not None else Path.cwd()
    is_script = command.endswith(".py") and len(command.split()) == 1
    line = migrate.read_script(Path(command), Path.cwd()) if is_script else migrate.read(_text(command))
    migration = migrate.migrate(line, Path.cwd(), target)
    if output is not None:
        write_file(output, migration.text())
    if as_json:
        return print_json(
            {
                "status": "complete" if migration.loads else "incomplete",
                "framework": migration.framework,
                "command": migration.program,
                "recipe": migration.recipe,
                "mapped": [flag._asdict() for flag in migration.mapped],
                "without": [flag._asdict() for flag in migration.without],
                "unknown": [flag._asdict() for flag in migration.unknown],
                "defaults": [flag._asdict() for flag in migration.defaults],
                "to_do": migration.to_do,
            }
        )
    _print_flags(migration)
    if output is None:
        return out.print(migration.text().rstrip(), markup=False)
    return err.print(f"{output}: check it with `align check {output}`", markup=False)


def _text(command: str) -> str:
    """The text with the command. Raises UserError for a file that cannot be read, or that is no shell script."""
    if command == "-":
        return sys.stdin.read()
    path = Path(command)
    try:
        if not path.is_file():
            return command
        return path.read_text()
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text, so it is no shell script") from None
    except OSError as error:  # a command is too long a file name
        if error.filename and not command.strip().count(" "):
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        return command


def _print_flags(migration: Any) -> None:
    """Print how each flag was converted."""
    for mapped in migration.mapped:
        value = "" if mapped.value is None else f" = {mapped.value}"
        err.print(f"{mapped.flag} → {mapped.field}{value}{f' ({mapped.note})' if mapped.note else ''}", markup=False)
    for reason, flags in migration.reasons().items():
        err.print(f"{flags}: {reason}", markup=False)
    for unknown in migration.unknown:
        hint = f"; did you mean {unknown.near}?" if unknown.near else ""
        err.print(f"[yellow]unknown:[/] {unknown.flag}{hint}")
    for sentence in migration.to_do:
        err.print("[yellow]to do:[/] ", end="")
        err.print(sentence, markup=False)
