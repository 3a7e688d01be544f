"""Functions and classes of the user, by name: their loading, and their part of a stage's key."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError
from alignment_core.source_code import PACKAGE, ROOT, digest_of_source
from alignment_core.user_code.definitions import NotDefined, definition
from alignment_core.user_code.dependencies import code_of
from alignment_core.user_code.errors import raised
from alignment_core.user_code.import_guard import load

LISTED = 10
"""Functions that a message lists if no name is similar."""


def load_function(name: str, field: str) -> Callable[..., Any]:
    """``module:function`` or ``file.py:function`` → the function.

    Raises UserError if there is no such function; ``field`` is the field of the recipe that names it.
    """
    source, function = _parts(name, field)
    try:
        module = load(source)
    except UserError:
        raise
    except Exception as error:  # the user's code runs here
        raise UserError(f"{field}: {name!r} cannot be loaded: {raised(error)}") from None
    value = getattr(module, function, None)
    if value is None:
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise _missing(field, source, function, known)
    if not callable(value):
        raise UserError(f"{field}: {name!r} is not a function")
    return value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine for certain: a coroutine function, or an object with an async ``__call__``.

    False does not mean that the result cannot be awaited: a decorator may return the coroutine of the function inside.
    """
    if inspect.iscoroutinefunction(function):
        return True
    return not isinstance(function, type) and inspect.iscoroutinefunction(type(function).__call__)


def function_content(name: str, field: str) -> dict[str, str]:
    """The part of a stage's key for a function or class: its name, and the digest of the file that defines it and of all that
    this file imports of the user's (see :mod:`~alignment_core.user_code.dependencies`). Nothing is executed. Raises UserError.
    """
    source, function = _parts(name, field)
    try:
        code = code_of(source)
        path = definition(code, function)
    except NotDefined as error:
        raise _missing(field, source, function, error.names) from None
    except (OSError, SyntaxError, ValueError, ImportError) as error:
        file = _file_of(source) if isinstance(error, ModuleNotFoundError) else None
        if file:
            raise UserError(
                f"{field}: there is no module {source!r} on Python's path; write {file}:{function}"
            ) from None
        raise UserError(f"{field}: {name!r} cannot be loaded: {raised(error)}") from None
    if path and path.suffix != ".py":
        raise UserError(f"{field}: {name!r} has no Python source; name a function written in Python")
    if path and path not in code.files.values() and not path.is_relative_to(ROOT / PACKAGE):
        code.count(f"{function} itself", path, digest_of_source(path.read_bytes()))
    return {"name": function, "code": code.digest()}


def _parts(name: str, field: str) -> tuple[str, str]:
    """The file or module, and the function's name."""
    source, separator, function = name.rpartition(":")
    if not separator or not source:
        raise UserError(f"{field}: {name!r} is neither `module:function` nor `file.py:function`{_meant(name)}")
    return source, function


def _meant(name: str) -> str:
    """A hint for a file without a function, or for a function's dotted name."""
    if name.endswith(".py") and Path(name).expanduser().is_file():
        return f"; add the function, as in {name}:FUNCTION"
    module, dot, function = name.rpartition(".")
    if not dot or not all(part.isidentifier() for part in name.split(".")):
        return ""
    return f"; did you mean {_file_of(module) or module}:{function}?"


def _file_of(module: str) -> str | None:
    """The module's file in the working folder, where imports do not look."""
    path = f"{module.replace('.', '/')}.py"
    return path if Path(path).is_file() else None


def _missing(field: str, source: str, function: str, known: list[str]) -> UserError:
    near = difflib.get_close_matches(function, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known[:LISTED]) or 'no function'}"
    return UserError(f"{field}: {source} has no {function!r}; {hint}")
