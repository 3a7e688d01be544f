"""The file that defines a function of the user's, according to the source: nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from alignment_core.source_code import parse
from alignment_core.user_code.dependencies import Code, locate

DYNAMIC = r"\b(__getattr__|globals|vars|locals|setattr|exec|modules|__dict__|f_globals)\b|import \*"
"""Source that mentions one of these may define names that it does not show."""


class NotDefined(Exception):
    """There is no such name; ``names`` are the public names that there are."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def definition(code: Code, name: str) -> Path | None:
    """The file that defines ``name`` in the module that ``code`` names, through imports such as ``from helper import name``
    and assignments such as ``name = helper.f``; the last file that is known if the source does not tell, and None for a module
    without a file, such as one of Python's own.

    Raises NotDefined if the source certainly defines no such name, and SyntaxError.
    """
    module = code.name
    path = code.files.get(module) or locate(module)
    seen = set[tuple[str, str]]()
    while path is not None and path.suffix == ".py" and (module, name) not in seen:
        is_first = not seen
        seen.add((module, name))
        source = path.read_bytes()
        try:
            bound = dict(_bound(parse(source)))
        except (SyntaxError, ValueError):
            if is_first:
                raise
            return path
        if is_first and name not in bound and not re.search(rf"\b{re.escape(name)}\b|{DYNAMIC}".encode(), source):
            raise NotDefined([other for other in bound if not other.startswith("_")])
        target = _target(bound, name, module, path)
        if target is None:
            return path
        if target[0] != module:
            path = code.find(target[0]) or locate(target[0])
        module, name = target
    return path


def _target(bound: dict[str, ast.AST], name: str, module: str, path: Path) -> tuple[str, str] | None:
    """The module and name that a name is imported from or assigned from; None if it is defined in another way, or here."""
    statement = bound.get(name)
    if isinstance(statement, ast.ImportFrom):
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        parents = package[: len(package) - statement.level + 1] if statement.level else []
        origin = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        return ".".join([*parents, *filter(None, [statement.module])]), origin
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Name):
        return module, value.id
    dotted = ast.unparse(value) if isinstance(value, ast.Attribute) else ""
    first, _, rest = dotted.partition(".")
    imported = bound.get(first)
    if not isinstance(imported, ast.Import) or not dotted.replace(".", "").isidentifier():
        return None
    alias = next(alias for alias in imported.names if (alias.asname or alias.name.partition(".")[0]) == first)
    whole = f"{alias.name}.{rest}" if alias.asname else dotted
    return whole.rpartition(".")[0], whole.rpartition(".")[2]


def _bound(node: ast.AST, statement: ast.AST | None = None) -> Iterator[tuple[str, ast.AST]]:
    """The names of a module outside its functions and classes, in order, each with the statement that binds it."""
    for child in ast.iter_child_nodes(node):
        binder = child if isinstance(child, ast.stmt) else statement
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name.partition(".")[0]), child) for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and binder is not None:
            yield child.id, binder
        else:
            yield from _bound(child, binder)
