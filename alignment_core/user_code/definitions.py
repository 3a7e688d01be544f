"""Where a function of the user's is defined, as the source says: nothing is executed to know it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from alignment_core.source_code import parse
from alignment_core.user_code.dependencies import Code, locate

DYNAMIC = {"__getattr__", "globals", "vars", "locals", "setattr", "exec", "modules", "__dict__", "f_globals", "*"}
"""Source that mentions one of these may make names that cannot be seen in it."""


class NotDefined(Exception):
    """There is no such name; ``names`` are those that there are."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def definition(code: Code, name: str) -> Path | None:
    """The file that defines ``name``, which the file that ``code`` names may import; that file itself if the source does not
    tell, and None if it has none, as what is compiled into Python.

    Raises NotDefined where it is certain that there is none of that name.
    """
    path = code.files.get(code.name) or locate(code.name)
    return path and _definition(code, code.name, path, name, set())


def _definition(code: Code, module: str, path: Path, name: str, seen: set[tuple[str, str]]) -> Path | None:
    if path.suffix != ".py" or (module, name) in seen:
        return path
    seen.add((module, name))
    tree = parse(path.read_bytes())
    bound = dict(_bound(tree.body))
    if name not in bound:
        if any(_may_make(one, name) for one in ast.walk(tree)):
            return path
        raise NotDefined([one for one in bound if not one.startswith("_")])
    by = bound[name]
    if isinstance(by, ast.Assign | ast.AnnAssign) and by.value is not None:
        return _of_value(code, module, path, by.value, seen)
    if isinstance(by, ast.ImportFrom):
        alias = next(one for one in by.names if (one.asname or one.name) == name)
        return _imported(code, _absolute(by, module, path), alias.name, seen)
    return path


def _of_value(code: Code, module: str, path: Path, value: ast.expr, seen: set[tuple[str, str]]) -> Path | None:
    """Of ``f = other`` and ``f = module.f``; whatever else makes a function is in the file itself."""
    if isinstance(value, ast.Name):
        try:
            return _definition(code, module, path, value.id, seen)
        except NotDefined:  # one of Python's own, as `len`
            return path
    dotted = ast.unparse(value) if isinstance(value, ast.Attribute) else ""
    first, _, rest = dotted.partition(".")
    by = dict(_bound(parse(path.read_bytes()).body)).get(first)
    if not rest or not isinstance(by, ast.Import) or not dotted.replace(".", "").isidentifier():
        return path
    alias = next(one for one in by.names if (one.asname or one.name.partition(".")[0]) == first)
    whole = f"{alias.name}.{rest}" if alias.asname else dotted
    return _imported(code, whole.rpartition(".")[0], whole.rpartition(".")[2], seen)


def _imported(code: Code, module: str, name: str, seen: set[tuple[str, str]]) -> Path | None:
    path = code.find(module) or locate(module)
    try:
        return path and _definition(code, module, path, name, seen)
    except (NotDefined, SyntaxError, ValueError):
        return path


def _absolute(by: ast.ImportFrom, module: str, path: Path) -> str:
    if not by.level:
        return by.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - by.level + 1], *([by.module] if by.module else [])])


def _bound(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names of a module, and what gives them; not of the functions and classes in it."""
    for one in statements:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one.name, one
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name.partition(".")[0]), one) for alias in one.names)
        else:
            for part in ast.walk(one) if not hasattr(one, "body") else _expressions(one):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, one
            for field in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(one, field, []))
            for block in (*getattr(one, "handlers", ()), *getattr(one, "cases", ())):
                yield from _bound(block.body)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement with a body has beside it."""
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from ast.walk(part)


def _may_make(node: ast.AST, name: str) -> bool:
    """Whether this, anywhere in a module, may give it ``name``: in a function, by a pattern, or in a way that is not seen."""
    if isinstance(node, ast.Global):
        return name in node.names
    if isinstance(node, ast.Constant):
        return node.value == name  # as a text that a decorator or a registry is given
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
        return True
    if isinstance(node, ast.NamedExpr):
        return node.target.id == name
    if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping):
        return name in (getattr(node, "name", None), getattr(node, "rest", None))
    return bool(DYNAMIC & {getattr(node, field, None) for field in ("id", "attr", "name")})
