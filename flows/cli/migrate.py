"""The command ``align migrate``: a recipe from a command line of OpenRLHF or TRL, or from a script that uses TRL."""

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
    made = migrate.migrate(line, Path.cwd(), target)
    if output is not None:
        write_file(output, made.text())
    if as_json:
        return print_json(
            {
                "status": "complete" if made.loads else "incomplete",
                "framework": made.framework,
                "command": made.program,
                "recipe": made.recipe,
                "mapped": [one._asdict() for one in made.mapped],
                "without": [one._asdict() for one in made.without],
                "unknown": [one._asdict() for one in made.unknown],
                "defaults": [one._asdict() for one in made.defaults],
                "to_do": made.to_do,
            }
        )
    _say(made)
    if output is None:
        return out.print(made.text().rstrip(), markup=False)
    return err.print(f"{output}: `align check {output}` looks at it", markup=False)


def _text(command: str) -> str:
    """The text that has the command. Raises UserError for a file that cannot be read, or that is no shell script."""
    if command == "-":
        return sys.stdin.read()
    path = Path(command)
    try:
        if not path.is_file():
            return command
        return path.read_text()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a shell script: it is no text") from None
    except OSError as error:  # too long a name is a command
        if error.filename and not command.strip().count(" "):
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        return command


def _say(made: Any) -> None:
    """What became of the flags, beside the recipe."""
    for one in made.mapped:
        value = "" if one.value is None else f" = {one.value}"
        err.print(f"{one.flag} → {one.field}{value}{f' ({one.note})' if one.note else ''}", markup=False)
    for why, flags in made.reasons().items():
        err.print(f"{flags}: {why}", markup=False)
    for one in made.unknown:
        hint = f"; did you mean {one.near}?" if one.near else ""
        err.print(f"[yellow]unknown:[/] {one.flag}{hint}")
    for sentence in made.to_do:
        err.print("[yellow]to do:[/] ", end="")
        err.print(sentence, markup=False)
