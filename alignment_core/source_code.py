"""Python source as a stage's key counts it: by what it computes, not by how it is written."""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Callable
from typing import Any

PARSING = threading.RLock()
"""Python 3.11's ``ast.parse`` fails where garbage collection in the middle of it lets another thread into it."""


def parse(source: bytes | str) -> ast.Module:
    """The syntax tree of ``source``; safe from several threads. Raises SyntaxError, and ValueError for null bytes."""
    with PARSING:
        return ast.parse(source)


def digest_of_source(source: bytes, docstrings: bool = False) -> str:
    """As :func:`digest_of_tree`; what is no Python, such as a template, counts by its bytes."""
    try:
        return digest_of_tree(parse(source), docstrings)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()


def digest_of_tree(tree: ast.AST, docstrings: bool = False) -> str:
    """SHA-256 of what a syntax tree computes: comments and formatting are not in it, nor are docstrings unless asked for.

    Ask for them where a library may show them to a policy, as those of tools. The same in every version of Python.
    """
    digest = hashlib.sha256()
    _feed(tree, digest.update, docstrings)
    return digest.hexdigest()


def _feed(value: Any, write: Callable[[bytes], None], docstrings: bool) -> None:
    # `ast.dump` would do, but what it leaves out differs between versions of Python, and it takes longer.
    if isinstance(value, list):
        write(b"[")
        for one in value:
            if docstrings or not _is_text(one):
                _feed(one, write, docstrings)
        write(b"]")
    elif isinstance(value, ast.Constant):
        write(f"{type(value.value).__name__}:{value.value!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(value, ast.AST):
        write(f"{type(value).__name__}(".encode())
        for name in value._fields:
            field = getattr(value, name, None)
            if field is not None and field != [] and not isinstance(field, ast.expr_context):
                write(f"{name}=".encode())
                _feed(field, write, docstrings)
        write(b")")
    else:
        write(f"{value!r};".encode())


def _is_text(statement: Any) -> bool:
    """Whether a statement is a text that nobody uses: a docstring, of a module, function, class or field."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
