"""Python source as a stage's key counts it: by what it computes, not by how it is written."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from alignment_core.errors import EnvironmentFault
from alignment_core.public import FACADE, MODULE_OF

PACKAGE = "alignment_core"
ROOT = Path(__file__).parents[1]
"""The folder that has this package."""
PARSING = threading.RLock()
"""Held while this package has Python parse source, itself or through pydantic; see :func:`parse`."""
ATTEMPTS = 5
READS_ITSELF = (b"__doc__", b"getdoc", b"getsource", b"getcomments")
"""Where source mentions one of these, it may compute with its own text."""
NEVER_COMPUTES = (
    # what is needed to run any stage, but decides no result
    "alignment_core.credentials",
    "alignment_core.errors",
    "alignment_core.execution.base",
    "alignment_core.execution.cost",
    "alignment_core.execution.curve",
    "alignment_core.execution.key",
    "alignment_core.execution.machine_queue",
    "alignment_core.execution.machines",
    "alignment_core.execution.packages",
    "alignment_core.execution.cache_miss",
    "alignment_core.execution.restarts",
    "alignment_core.execution.runner",
    "alignment_core.execution.stopwatch",
    "alignment_core.execution.scheduling",
    "alignment_core.execution.warm_actors",
    "alignment_core.home",
    "alignment_core.imports",
    "alignment_core.journal",
    "alignment_core.machine_memory",
    "alignment_core.network",
    "alignment_core.plugins",
    "alignment_core.processes",
    # where it runs and what watches it
    "alignment_core.cluster",
    "alignment_core.host",
    "alignment_core.tracking",
    # where inputs lie; what they are, their digests say
    "alignment_core.artifacts",
    "alignment_core.data.hub",
    # settings: their values are in the key, and defaults are values
    "alignment_core.recipes",
    # which stages run, and with which inputs: both are in the key
    "alignment_core.composition",
    "alignment_core.methods",
    # what finds the code that counts, and refuses all other: the code itself is in the key
    "alignment_core.source_code",
    "alignment_core.user_code.dependencies",
    "alignment_core.user_code.definitions",
    "alignment_core.user_code.import_guard",
    # sentences for people, and who may call a server
    "alignment_core.inference.kv_cache",
    "alignment_core.inference.server_log",
    "alignment_core.inference.token_guard",
    "alignment_core.rewards.http_errors",
    # what metrics are called where people see them
    "alignment_core.evaluation.metric_names",
    # after the stages, or before them
    "alignment_core.checks",
    "alignment_core.doctor",
    "alignment_core.lineage",
    "alignment_core.nights",
    "alignment_core.reporting",
)
"""Our modules, and packages with all that they hold, that no stage's result follows from, whoever imports them."""
SHOWS_ERRORS = ("alignment_core.environments",)
"""Where the text of an error counts: a policy reads it."""
_LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


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


def digest_of_source(source: bytes, docstrings: bool = False, messages: bool = True) -> str:
    """As :func:`digest_of_tree`; what is no Python, such as a template, or may read itself, counts by its bytes."""
    try:
        return _digest(source, parse(source), docstrings, messages)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()


def _digest(source: bytes, tree: ast.AST, docstrings: bool = False, messages: bool = True) -> str:
    if any(word in source for word in READS_ITSELF):
        return hashlib.sha256(source).hexdigest()
    return digest_of_tree(tree, docstrings, messages)


def digest_of_tree(tree: ast.AST, docstrings: bool = False, messages: bool = True) -> str:
    """SHA-256 of what a syntax tree computes: comments and formatting are not in it, nor are docstrings unless asked for.

    Ask for them where a library may show them to a policy, as those of tools. Leave out ``messages``, the texts of errors
    and logs, where nothing computes with the text of an error. The same in every version of Python.
    """
    digest = hashlib.sha256()
    _feed(tree, digest.update, docstrings, messages)
    return digest.hexdigest()


def _feed(tree: ast.AST, write: Callable[[bytes], None], docstrings: bool, messages: bool) -> None:
    # `ast.dump` would do, but what it leaves out differs between versions of Python, and it takes longer. No recursion: a long
    # chain of `elif` is a deep tree.
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes):
            write(value)
        elif isinstance(value, list):
            kept = value if docstrings else [one for one in value if not _is_text(one)]
            kept = kept if messages else [one for one in kept if not _is_log(one)]
            waiting += [b"]", *reversed(kept), b"["]
        elif isinstance(value, ast.Constant):
            write(f"{type(value.value).__name__}:{value.value!r};".encode("utf-8", "surrogatepass"))
        elif isinstance(value, ast.Raise) and isinstance(value.exc, ast.Call) and not messages:
            call, said = value.exc, [one for one in value.exc.args if not _is_message(one)]
            named = [one for one in call.keywords if not _is_message(one.value)]
            waiting += [value.cause or b"", named, said, call.func, b"raise "]
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


def _is_message(node: ast.expr) -> bool:
    """Whether an expression makes a sentence, and binds nothing meanwhile. A single word may be data, such as a reason."""
    if isinstance(node, ast.BinOp):
        return _is_message(node.left) or _is_message(node.right)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    return (is_text or isinstance(node, ast.JoinedStr)) and not _does_more(node)


def _is_log(statement: Any) -> bool:
    """Whether a statement only writes to the module's ``log``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "log"
        and function.attr in _LOGS
        and not _does_more(statement)
    )


def _does_more(node: ast.AST) -> bool:
    return any(isinstance(one, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for one in ast.walk(node))


@dataclass(frozen=True)
class Source:
    """What is known of a source file."""

    digest: str
    """Without docstrings and, where nobody computes with them, without messages."""
    imports: tuple[str, ...]
    """Modules that it may import, wherever in it, and names in such modules, which may be modules themselves."""
    empty: bool = False
    """Whether it holds nothing but a docstring."""


def read(data: bytes, module: str, path: Path) -> Source:
    """The source of ``module``, empty for one without a package. Raises SyntaxError, and ValueError for null bytes."""
    tree = parse(data)
    package, top = module if path.name == "__init__.py" else module.rpartition(".")[0], module.partition(".")[0]
    digest = _digest(data, tree, messages=top != PACKAGE or within(module, SHOWS_ERRORS))
    return Source(digest, tuple(dict.fromkeys(_imports(tree, package, top))), all(_is_text(one) for one in tree.body))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but for what is only there for type checkers."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        only_types = isinstance(node, ast.If) and _called(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if only_types and isinstance(node, ast.If) else ast.iter_child_nodes(node)


def _imports(tree: ast.Module, package: str, top: str) -> Iterator[str]:
    facades = {
        alias.asname or alias.name
        for node in _running(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == FACADE
    }
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            if base == FACADE:
                yield from (MODULE_OF[alias.name] for alias in node.names if alias.name in MODULE_OF)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr in MODULE_OF and getattr(node.value, "id", "") in facades:
            yield MODULE_OF[node.attr]
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
    base = folder.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.with_name(f"{parts[-1]}.py")) if path.is_file()), None)


def within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these, or lies in a package that is."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def spec_of(name: str, search_path: Iterable[str] | None = None) -> ModuleSpec | None:
    """How imports find a module, from ``search_path`` or from everywhere; unlike importlib's, it imports no parents."""
    top, *parts = name.split(".")
    spec = _top(top) if search_path is None else PathFinder.find_spec(top, list(search_path))
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # by its last name: the search path of a package without __init__.py is looked up where its parent was imported
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _top(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if getattr(finder, "of_user_code", False) or not hasattr(finder, "find_spec"):
            continue
        if (spec := finder.find_spec(name, None)) is not None:
            return spec
    return None


@functools.cache
def package_source(module: str) -> tuple[Path, Source] | None:
    """The source of a module of this package, as it was when this process first asked."""
    path = find(ROOT, module) if module.partition(".")[0] == PACKAGE else None
    return None if path is None else (path, read(path.read_bytes(), module, path))


def computing_source(module: str) -> tuple[Path, Source] | None:
    """As package_source, and none of what never computes."""
    return None if within(module, NEVER_COMPUTES) else package_source(module)


_READ: dict[Path, tuple[int, int]] = {}
"""Time and size of each file of a plug-in that was read here, as it was then."""


def stamp_of(path: str | Path) -> tuple[int, int] | None:
    """Time and size of a file; None where it is gone."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def edited_plugins() -> list[str]:
    """Files of plug-ins that changed since this process read what they compute."""
    read = _READ.copy()  # at once: other threads may read more
    return sorted(str(path) for path, stamp in read.items() if stamp_of(path) != stamp)


@functools.cache
def _source(module: str) -> tuple[Path, Source]:
    """The source of a module of ours or of a plug-in, which is not imported. Raises EnvironmentFault if there is none."""
    if (own := package_source(module)) is not None:
        return own
    spec = None if module.partition(".")[0] == PACKAGE else spec_of(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise EnvironmentFault(f"{module}, which computes a stage's result, has no Python source here")
    path = Path(spec.origin)
    if (stamp := stamp_of(path)) is not None:
        _READ.setdefault(path, stamp)
    return path, read(path.read_bytes(), module, path)


@functools.cache
def modules_behind(name: str) -> tuple[str, ...]:
    """The module ``name`` and all that it can reach by imports, of its own distribution and of ours, that may compute."""
    top = name.partition(".")[0]

    def source_of(module: str) -> tuple[Path, Source] | None:
        if module.partition(".")[0] == PACKAGE:
            return computing_source(module)
        with suppress(EnvironmentFault):  # a name in a module, which is no module itself
            return _source(module) if module.partition(".")[0] == top else None
        return None

    return tuple(sorted(one for one, (_, source) in reachable(name, source_of).items() if not source.empty))


def digest_of_module(name: str) -> str:
    """16 hex digits over what a module of ours or of a plug-in computes, as it was when this process first asked."""
    return _source(name)[1].digest[:16]
