"""Functions and classes of the user, by name: how they are found and loaded, and what of them a stage's key counts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError
from alignment_core.source_code import PACKAGE, ROOT
from alignment_core.user_code.definitions import NotDefined, definition
from alignment_core.user_code.dependencies import code_of
from alignment_core.user_code.errors import raised
from alignment_core.user_code.import_guard import load

LISTED = 10
"""Functions that a message names where none is near."""


def load_function(name: str, field: str) -> Callable[..., Any]:
    """``module:function`` or ``file.py:function`` → the function.

    Raises UserError if there is no such function; ``field`` is where the recipe names it.
    """
    source, function = _parts(name, field)
    try:
        module = load(source)
    except UserError:
        raise
    except Exception as error:  # the user's code runs here
        raise UserError(f"{field}: {name!r} cannot be loaded: {raised(error)}") from None
    if (found := getattr(module, function, None)) is None:
        known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise UserError(f"{field}: {source} has no {function!r}; {_nearest(function, known)}")
    if not callable(found):
        raise UserError(f"{field}: {name!r} is not a function")
    return found


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine for certain: a coroutine function, or an object with an async ``__call__``.

    False does not mean that the result cannot be awaited: a decorator may return the coroutine of the function inside.
    """
    if inspect.iscoroutinefunction(function):
        return True
    return not isinstance(function, type) and inspect.iscoroutinefunction(type(function).__call__)


def function_content(name: str, field: str, docstrings: bool = False) -> dict[str, str]:
    """What a function or class is, for stage keys: its name and the digest of what its file computes, and all of the user's
    that this imports (see :mod:`~alignment_core.user_code.dependencies`). Nothing of it is executed. Raises UserError.

    With ``docstrings`` they count, too: ask for it where a policy may get to read them, as it does those of some tools.
    """
    source, function = _parts(name, field)
    try:
        code = code_of(source)
        path = definition(code, function)
    except NotDefined as error:
        raise UserError(f"{field}: {source} has no {function!r}; {_nearest(function, error.names)}") from None
    except (OSError, SyntaxError, ValueError, ImportError) as error:
        if isinstance(error, ModuleNotFoundError) and (file := _file_of(source)):
            raise UserError(
                f"{field}: there is no module {source!r} on Python's path; write {file}:{function}"
            ) from None
        if not source.endswith(".py") and not isinstance(error, ModuleNotFoundError):
            load_function(name, field)  # of Python's own, or compiled: says what is wrong beside that
            raise _without_source(name, field) from None
        raise UserError(f"{field}: {name!r} cannot be loaded: {raised(error)}") from None
    if path and path.suffix != ".py":
        raise _without_source(name, field)
    if path and path not in code.files.values() and not path.is_relative_to(ROOT / PACKAGE):
        code.files[f"{function} itself"] = path
    return {"name": function, "code": code.digest(docstrings)}


def _parts(name: str, field: str) -> tuple[str, str]:
    """Where the function is, and what it is called."""
    source, separator, function = name.rpartition(":")
    if not separator or not source:
        raise UserError(f"{field}: {name!r} is neither `module:function` nor `file.py:function`{_meant(name)}")
    return source, function


def _meant(name: str) -> str:
    """What somebody may have meant who wrote a file alone, or the dotted name of a function."""
    if name.endswith(".py") and Path(name).expanduser().is_file():
        return f"; add the function, as in {name}:FUNCTION"
    module, dot, function = name.rpartition(".")
    if not dot or not all(part.isidentifier() for part in name.split(".")):
        return ""
    return f"; did you mean {_file_of(module) or module}:{function}?"


def _file_of(module: str) -> str | None:
    """The file in the working folder of a module that Python does not find there by itself."""
    path = Path(*module.split(".")).with_suffix(".py")
    return str(path) if path.is_file() else None


def _without_source(name: str, field: str) -> UserError:
    return UserError(f"{field}: {name!r} has no Python source; name a function written in Python")


def _nearest(function: str, known: list[str]) -> str:
    near = difflib.get_close_matches(function, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known[:LISTED]) or 'no function'}"
