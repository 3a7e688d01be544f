"""Python source as a stage's key counts it: by what it computes, not by how it is written."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "alignment_core"
ROOT = Path(__file__).parents[1]
"""The folder that has this package."""
PARSING = threading.RLock()
"""Held while this package has Python parse source, itself or through pydantic; see :func:`parse`."""
ATTEMPTS = 5
READS_ITSELF = (b"__doc__", b"getdoc", b"getsource", b"getcomments")
"""Where source mentions one of these, it may compute with its own text."""


def parse(source: bytes | str) -> ast.Module:
    """The syntax tree of ``source``; safe from several threads. Raises SyntaxError, and ValueError for null bytes.

    Python 3.11's ``ast.parse`` counts its depth in one place for all threads, and raises SystemError where garbage collection
    in the middle of it lets another thread into it, ours or not. So none is collected here; and what some library's thread
    enables again meanwhile costs another attempt.
    """
    with PARSING:
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(ATTEMPTS - 1):
                with suppress(SystemError):
                    return ast.parse(source)
            return ast.parse(source)
        finally:
            if collects:
                gc.enable()


def digest_of_source(source: bytes, docstrings: bool = False) -> str:
    """As :func:`digest_of_tree`; what is no Python, such as a template, or may read itself, counts by its bytes."""
    try:
        return _digest(source, parse(source), docstrings)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()


def _digest(source: bytes, tree: ast.AST, docstrings: bool = False) -> str:
    if any(word in source for word in READS_ITSELF):
        return hashlib.sha256(source).hexdigest()
    return digest_of_tree(tree, docstrings)


def digest_of_tree(tree: ast.AST, docstrings: bool = False) -> str:
    """SHA-256 of what a syntax tree computes: comments and formatting are not in it, nor are docstrings unless asked for.

    Ask for them where a library may show them to a policy, as those of tools. The same in every version of Python.
    """
    digest = hashlib.sha256()
    _feed(tree, digest.update, docstrings)
    return digest.hexdigest()


def _feed(tree: ast.AST, write: Callable[[bytes], None], docstrings: bool) -> None:
    # `ast.dump` would do, but what it leaves out differs between versions of Python, and it takes longer. No recursion: a long
    # chain of `elif` is a deep tree.
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes):
            write(value)
        elif isinstance(value, list):
            kept = value if docstrings else [one for one in value if not _is_text(one)]
            waiting += [b"]", *reversed(kept), b"["]
        elif isinstance(value, ast.Constant):
            write(f"{type(value.value).__name__}:{value.value!r};".encode("utf-8", "surrogatepass"))
        elif isinstance(value, ast.AST):
            waiting.append(b")")
            for name in reversed(value._fields):
                field = getattr(value, name, None)
                if field is not None and field != [] and not isinstance(field, ast.expr_context):
                    waiting += [field, f"{name}=".encode()]
            waiting.append(f"{type(value).__name__}(".encode())
        else:
            write(f"{value!r};".encode())


def _is_text(statement: Any) -> bool:
    """Whether a statement is a text that nobody uses: a docstring, of a module, function, class or field."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@dataclass(frozen=True)
class Source:
    """What is known of a source file."""

    digest: str
    """Without docstrings."""
    imports: tuple[str, ...]
    """Modules that it may import, wherever in it, and names in such modules, which may be modules themselves."""


def read(data: bytes, module: str, path: Path) -> Source:
    """The source of ``module``, empty for one without a package. Raises SyntaxError, and ValueError for null bytes."""
    tree = parse(data)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return Source(_digest(data, tree), tuple(dict.fromkeys(_imports(tree, package, module.partition(".")[0]))))


def _imports(tree: ast.Module, package: str, top: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            yield from (
                one.value for one in node.args[:1] if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and top and node.value.startswith(f"{top}.")
        ):
            yield node.value.partition(":")[0]  # an actor's factory or a worker extension, named by its import path
            yield node.value.rpartition(".")[0]


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def reachable(start: str, source_of: Callable[[str], tuple[Path, Source] | None]) -> dict[str, tuple[Path, Source]]:
    """The module ``start`` and all that it can reach by imports, by name; ``source_of`` is None for what does not count."""
    found: dict[str, tuple[Path, Source]] = {}
    waiting, seen = [start], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if (one := source_of(name)) is not None:
            found[name] = one
            waiting.extend(one[1].imports)
    return found


def find(folder: Path, name: str) -> Path | None:
    """The file of a module below ``folder``; looked up on disk, because importlib would import the parents."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    place = folder.joinpath(*parts)
    return next((path for path in (place / "__init__.py", place.with_name(f"{parts[-1]}.py")) if path.is_file()), None)


@functools.cache
def package_source(module: str) -> tuple[Path, Source] | None:
    """The source of a module of this package, as it was when this process first asked."""
    path = find(ROOT, module) if module.partition(".")[0] == PACKAGE else None
    return None if path is None else (path, read(path.read_bytes(), module, path))


@functools.cache
def code_digest(module: str) -> str:
    """SHA-256 over what ``module`` computes, and every module of this package that it can reach by imports."""
    digest = hashlib.sha256()
    for name, (_, source) in sorted(reachable(module, package_source).items()):
        digest.update(f"{name}\0{source.digest}".encode())
    return digest.hexdigest()
