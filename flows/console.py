"""What the commands of ``align`` share: options, where they print, and the one JSON object of ``--json``."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from alignment_core.journal import now

StoreOption = Annotated[str | None, typer.Option("--store", help="Artifact store; default $ALIGN_HOME/store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(content: dict[str, Any]) -> None:
    print_line(json.dumps(content, ensure_ascii=False, default=str))


def print_line(text: str) -> None:
    """One line to stdout, in one piece, as threads print, too. Raises OSError where nobody reads it any more."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line of a background process's log; while the disk is full it takes none, and that ends nothing."""
    with suppress(OSError):
        print(f"{now()} {text}", flush=True)
