"""Python source as a stage's key counts it: by what it computes, not by its formatting."""

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
"""Held while Python parses source for this package, here or through pydantic; see :func:`parse`."""
ATTEMPTS = 5
READS_ITSELF = (b"__doc__", b"getdoc", b"getsource", b"getcomments")
"""Source that mentions one of these may compute with its own text."""
NEVER_COMPUTES = (
    # needed to run any stage, but without influence on results
    "alignment_core.control_groups",
    "alignment_core.cores",
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
    # placement and monitoring
    "alignment_core.cluster",
    "alignment_core.host",
    "alignment_core.tracking",
    # storage of inputs, whose digests are in the key
    "alignment_core.artifacts",
    "alignment_core.data.addresses",
    "alignment_core.data.hub",
    # settings: their values are in the key, defaults included
    "alignment_core.recipes",
    # which stages run, and with which inputs: both are in the key
    "alignment_core.composition",
    "alignment_core.methods",
    # decides which of the user's code counts; that code itself is in the key
    "alignment_core.source_code",
    "alignment_core.user_code.dependencies",
    "alignment_core.user_code.definitions",
    "alignment_core.user_code.import_guard",
    # messages for people, and access to servers
    "alignment_core.inference.kv_cache",
    "alignment_core.inference.server_log",
    "alignment_core.inference.server_process",
    "alignment_core.inference.token_guard",
    "alignment_core.rewards.http_errors",
    # display names of metrics
    "alignment_core.evaluation.metric_names",
    # run before or after stages
    "alignment_core.checks",
    "alignment_core.doctor",
    "alignment_core.lineage",
    "alignment_core.nights",
    "alignment_core.reporting",
)
"""Modules and packages of ours that never influence a stage's result, whichever module imports them."""
SHOWN_TO_POLICIES = ("alignment_core.environments",)
"""Packages of ours whose docstrings and errors count, because a policy reads them."""
_LOGS = {"debug", "info", "warning", "error", "exception", "critical"}


def parse(source: bytes | str) -> ast.Module:
    """The syntax tree of ``source``; safe from several threads. Raises SyntaxError, and ValueError for null bytes.

    Python 3.11's ``ast.parse`` counts its depth in one place for all threads, and raises SystemError if garbage collection in
    the middle of it lets another thread parse. So collection is off meanwhile; a library's thread may turn it on again, which
    costs another attempt.
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


def digest_of_source(source: bytes) -> str:
    """SHA-256 of what Python source computes: comments and formatting are left out. The same in every version of Python.

    A file that is not Python, such as a template, or that may read its own source counts by its bytes.
    """
    try:
        return _digest(source, parse(source), texts=True)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()


def _digest(source: bytes, tree: ast.AST, texts: bool) -> str:
    """Without ``texts``, docstrings and the sentences of errors and logs are left out: nothing computes with them."""
    if any(word in source for word in READS_ITSELF):
        return hashlib.sha256(source).hexdigest()
    digest = hashlib.sha256()
    _feed(tree, digest.update, texts)
    return digest.hexdigest()


def _feed(tree: ast.AST, write: Callable[[bytes], None], texts: bool) -> None:
    # `ast.dump` would do, but the fields that it leaves out differ between versions of Python, and it takes longer. No
    # recursion: a long chain of `elif` is a deep tree.
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes):
            write(value)
        elif isinstance(value, list):
            kept = value if texts else [item for item in value if not (_is_text(item) or _is_log(item))]
            waiting += [b"]", *reversed(kept), b"["]
        elif isinstance(value, ast.Constant):
            write(f"{type(value.value).__name__}:{value.value!r};".encode("utf-8", "surrogatepass"))
        elif isinstance(value, ast.Raise) and isinstance(value.exc, ast.Call) and not texts:
            call = value.exc
            arguments = [argument for argument in call.args if not _is_sentence(argument)]
            keywords = [keyword for keyword in call.keywords if not _is_sentence(keyword.value)]
            waiting += [value.cause or b"", keywords, arguments, call.func, b"raise "]
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
    """Whether a statement is an unused text: the docstring of a module, function, class or field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_sentence(node: ast.expr) -> bool:
    """Whether an expression makes a sentence, and does nothing else. A single word may be data, such as a reason."""
    if isinstance(node, ast.BinOp):
        return _is_sentence(node.left) or _is_sentence(node.right)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    return (is_text or isinstance(node, ast.JoinedStr)) and not _has_effects(node)


def _is_log(statement: Any) -> bool:
    """Whether a statement only writes to the module's ``log``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    is_log = (
        isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "log" and function.attr in _LOGS
    )
    return is_log and not _has_effects(statement)


def _has_effects(node: ast.AST) -> bool:
    return any(isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for part in ast.walk(node))


@dataclass(frozen=True)
class Source:
    """Digest and imports of a source file."""

    digest: str
    """As digest_of_source; without docstrings and the sentences of errors and logs for modules of ours, except those that a
    policy reads."""
    imports: tuple[str, ...]
    """Modules that it may import, anywhere in it, and names in these modules, which may be modules themselves."""
    is_empty: bool = False
    """Whether it has nothing but a docstring."""


def read(data: bytes, module: str, path: Path) -> Source:
    """The source of ``module``. Raises SyntaxError, and ValueError for null bytes."""
    tree = parse(data)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    top = module.partition(".")[0]
    digest = _digest(data, tree, texts=top != PACKAGE or within(module, SHOWN_TO_POLICIES))
    return Source(digest, tuple(dict.fromkeys(_imports(tree, package, top))), all(map(_is_text, tree.body)))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without the branches for type checkers."""
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
            names = (name.value for name in node.args[:1] if isinstance(name, ast.Constant))
            yield from (name for name in names if isinstance(name, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{top}."):
            yield node.value.partition(":")[0]  # an actor's factory or a worker extension, named by its import path
            yield node.value.rpartition(".")[0]


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def reachable(start: str, source_of: Callable[[str], tuple[Path, Source] | None]) -> dict[str, tuple[Path, Source]]:
    """The module ``start`` and all modules that it reaches by imports, by name; ``source_of`` is None for one that does not
    count."""
    sources: dict[str, tuple[Path, Source]] = {}
    waiting = [start]
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        if (source := source_of(name)) is not None:
            sources[name] = source
            waiting.extend(source[1].imports)
    return sources


def within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these packages or lies in one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def spec_of(name: str, search_path: Iterable[str] | None = None) -> ModuleSpec | None:
    """The spec of a module on ``search_path``, by default wherever imports look; unlike importlib's, it imports no parents."""
    top, *parts = name.split(".")
    spec = _top(top) if search_path is None else PathFinder.find_spec(top, list(search_path))
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # by its last name: the search path of a package without __init__.py is looked up in its parent's
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
    """The source of a module of this package, as it was at the first call in this process."""
    if module.partition(".")[0] != PACKAGE:
        return None
    spec = spec_of(module, [str(ROOT)])
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin)
    return path, read(path.read_bytes(), module, path)


def computing_source(module: str) -> tuple[Path, Source] | None:
    """As package_source; None for modules that never compute."""
    return None if within(module, NEVER_COMPUTES) else package_source(module)


_READ: dict[Path, tuple[int, int] | None] = {}
"""Time and size of each file of a plug-in when it was read here."""


def stamp_of(path: str | Path) -> tuple[int, int] | None:
    """Time and size of a file; None if it is gone."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def edited_plugins() -> list[str]:
    """Files of plug-ins that changed since this process read them."""
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
    _READ.setdefault(path, stamp_of(path))  # before it is read, so that an edit in between is noticed
    return path, read(path.read_bytes(), module, path)


@functools.cache
def modules_behind(name: str) -> tuple[str, ...]:
    """The module ``name`` and all that it reaches by imports, in its own distribution and in ours, and that may compute."""
    top = name.partition(".")[0]

    def source_of(module: str) -> tuple[Path, Source] | None:
        if module.partition(".")[0] == PACKAGE:
            return computing_source(module)
        with suppress(EnvironmentFault):  # a name in a module, which is no module itself
            return _source(module) if module.partition(".")[0] == top else None
        return None

    return tuple(sorted(module for module, (_, source) in reachable(name, source_of).items() if not source.is_empty))


def digest_of_module(name: str) -> str:
    """16 hex digits over the code of a module of ours or of a plug-in, as it was at the first call in this process."""
    return _source(name)[1].digest[:16]
