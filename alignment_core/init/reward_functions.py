"""Reward functions that somebody names for a first recipe: whether they are there, and which columns they need."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError
from alignment_core.init.guess import ColumnMapping, columns_of
from alignment_core.init.models import relative
from alignment_core.recipes.paths import BEGINS
from alignment_core.recipes.sections.data import TAKEN
from alignment_core.source_code import parse
from alignment_core.user_code.definitions import definition
from alignment_core.user_code.dependencies import code_of
from alignment_core.user_code.functions import function_content

FIELD = "--reward"
READ = ("prompt", "messages", "tools")
"""Roles whose columns functions get in any case."""


def check(names: Sequence[str]) -> None:
    """Raise UserError for a name that names no function. None of the code is executed."""
    for name in names:
        try:
            function_content(name, FIELD)
        except UserError as error:  # a sentence about a recipe's paths is none about an option's
            raise UserError(str(error).replace(f" ({BEGINS})", "")) from None


def written(name: str, folder: Path) -> str:
    """The name as the recipe in ``folder`` has it."""
    file, colon, function = name.rpartition(":")
    return f"{relative(file, folder)}{colon}{function}" if file.endswith(".py") else name


def columns_for(names: Sequence[str], rows: Sequence[dict[str, Any]], reading: ColumnMapping) -> list[str]:
    """The columns of the rows to pass on to the functions: those that their parameters name, or all if one of them takes any.

    Columns of the prompt, columns that some row lacks and columns called like something else that functions get, are left out.
    """
    read = {column.partition(".")[0] for role, column in reading.columns.items() if role in READ}
    free = [one for one in columns_of(rows) if one not in TAKEN | read and all(one in row for row in rows)]
    named = [_parameters(name) for name in names]
    if any(parameters is None for parameters in named):
        return free
    return [one for one in free if any(one in (parameters or ()) for parameters in named)]


def _parameters(name: str) -> set[str] | None:
    """The names of the function's parameters; None if it may use any column: it takes ``**kwargs`` or rows, or the source does
    not tell."""
    source, _, function = name.rpartition(":")
    path = definition(code_of(source), function)
    tree = parse(path.read_bytes()) if path and path.suffix == ".py" else ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            arguments = node.args
            names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            return None if arguments.kwarg or len(names) == 1 or node.decorator_list else names
    return None
