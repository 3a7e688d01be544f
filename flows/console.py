"""Common parts of the commands: options, output, and the JSON object of ``--json``."""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.files import write_whole
from alignment_core.journal import now
from alignment_core.printable import escaped_json, printable

RecipeArgument = Annotated[
    Path, typer.Argument(help="Recipe file (YAML), or the name of a recipe that is installed, such as quickstart.")
]
RunArgument = Annotated[
    str, typer.Argument(help="Id of a run, its first digits, its name (the latest one), or `last`.")
]
SweepOption = Annotated[
    list[str],
    typer.Option(
        "--sweep", help="path=value,value: one variant per value, in one graph; several options give all combinations."
    ),
]
StoreOption = Annotated[str | None, typer.Option("--store", help="Artifact store. Default: see `align store use`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
"""Width of tables in a file or a pipe, where rich assumes 80 columns and breaks the words of a wide table."""


class SafeConsole(Console):
    """A console that escapes control characters in strings and tables: text of models and data may contain them."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


out = SafeConsole(highlight=False, soft_wrap=True, width=WIDTH)
err = SafeConsole(stderr=True, highlight=False, soft_wrap=True)


def check_output(output: Path, force: bool, option: str = "--force") -> None:
    """Raise UserError for a file that exists, except with ``force``, which ``option`` sets, and for a missing folder."""
    if output.is_dir() or (output.exists() and not force):
        raise UserError(f"{output} is there already: give another --output, or {option}")
    if not output.absolute().parent.is_dir():
        raise UserError(f"{output.absolute().parent}: no such folder")


def write_file(path: Path, text: str) -> None:
    """Write a file completely or not at all. Raises EnvironmentFault if it cannot be written."""
    try:
        write_whole(path, lambda file: file.write(text.encode()))
    except OSError as error:
        with suppress(OSError):
            path.with_suffix(".partial").unlink()
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from None


def print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(escaped_json(json.dumps(content, ensure_ascii=False, default=str)) + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """Write one line to stdout in one piece, as other threads print, too. Raises OSError if the reader has gone."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


class Unbroken:
    """A standard stream that drops its output after the first failure: the exit code still tells the outcome."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """The first failure, unless the reader has gone (``align … | head``)."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._silence(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._silence(error)

    def _silence(self, error: OSError) -> None:
        """Redirect the stream to /dev/null: the interpreter fails at its exit if it cannot flush the buffer."""
        self.lost = None if error.errno == errno.EPIPE else error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: str) -> None:
    """Write a line to a background process's log. A full disk is ignored, so that it does not end the process."""
    with suppress(OSError):
        print(f"{now()} {printable(text)}", flush=True)
