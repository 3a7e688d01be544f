"""The key of a stage call: what decides its result, as one hash, and what changed since an earlier call."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Provenance
from alignment_core.canonical import derive_seed, digest_of
from alignment_core.errors import EnvironmentFault
from alignment_core.source_code import PARSING, digest_of_tree, parse
from alignment_core.stages.base import StageCall

PACKAGE = "alignment_core"
ROOT = Path(__file__).parents[1]


def _stamps() -> dict[str, tuple[int, int]]:
    """Time and size of every source file of the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        stat = path.stat()
        found[path.relative_to(ROOT).as_posix()] = (stat.st_mtime_ns, stat.st_size)
    return found


_AT_START = _stamps()


def check_source() -> None:
    """Raise EnvironmentFault if the package's source changed since this process began.

    Modules are imported when they are first needed, so that no one could say which version made a result.
    """
    now = _stamps()
    changed = sorted(name for name in now.keys() | _AT_START.keys() if now.get(name) != _AT_START.get(name))
    if changed:
        raise EnvironmentFault(
            f"{PACKAGE}/{changed[0]} changed since this run started, so its results could not be told from those of the "
            "old source: start the run again; finished stages are kept"
        )


def key_parts(call: StageCall) -> dict[str, Any]:
    """What goes into the key. Placement, labels, paths and times do not. Raises EnvironmentFault, as check_source."""
    check_source()
    with PARSING:
        stage = call.definition()  # imports it, and pydantic parses its source for the descriptions of its fields
        code = code_digest(f"{PACKAGE}.stages.{call.stage}")
    optional = {"rerun": call.rerun, "stream": call.stream}
    return {
        **{name: value for name, value in optional.items() if value},
        "stage": stage.name,
        "version": stage.version,
        "config": stage.config.model_validate(call.config).content(),
        "inputs": {role: str(reference) for role, reference in sorted(call.inputs.items())},
        "seed": call.seed,
        "code": code,
    }


def stage_key(call: StageCall) -> str:
    """SHA-256 of :func:`key_parts`: equal in every process, on every machine with the same code."""
    return digest_of(key_parts(call))


def stage_seed(call: StageCall) -> int:
    """The seed of a stage: it follows from the recipe's, what the stage is, and its stream.

    Neither its settings nor its inputs are in it, so that two recipes that differ in one setting share all other noise.
    """
    return derive_seed(call.seed, call.stage, call.stream)


@functools.cache
def code_digest(module: str) -> str:
    """SHA-256 over what ``module`` computes, and every module of this package that it can reach by imports."""
    digest = hashlib.sha256()
    for name, path in sorted(_reachable(module).items()):
        digest.update(f"{name}\0{_read(path)[0]}".encode())
    return digest.hexdigest()


def _reachable(module: str) -> dict[str, Path]:
    """Source files by module name, following imports anywhere in a module, also inside functions."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name in found or path is None:
            continue
        found[name] = path
        waiting.extend(_read(path)[1])
        waiting.extend(_parents(name))
    return found


@functools.cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """The digest of a source file, and the modules of this package that it may import."""
    tree = parse(path.read_bytes())
    return digest_of_tree(tree), tuple(dict.fromkeys(_imports(tree)))


def _imports(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith(PACKAGE):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            yield node.value.partition(":")[0]  # an actor's factory or a worker extension, named by its import path
            yield node.value.rpartition(".")[0]


def _parents(name: str) -> Iterable[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@functools.cache
def _source(name: str) -> Path | None:
    """The file of a module of this package; looked up on disk, because importlib would import the parents (torch)."""
    package, *parts = name.split(".")
    if package != PACKAGE or not all(part.isidentifier() for part in parts):
        return None
    place = ROOT.joinpath(*parts)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def why_it_runs(parts: dict[str, Any], earlier: Iterable[Provenance]) -> str:
    """One line: what is different from the nearest earlier run of the same stage."""
    other = nearest(parts, earlier)
    if other is None:
        return "first run of this stage in this store"
    changed = changes(other.key_parts, parts)
    if not changed:
        return "its artifact is pruned, gone or damaged"
    shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
    return f"changed since {other.label}: {shown}"


def nearest(parts: dict[str, Any], earlier: Iterable[Provenance]) -> Provenance | None:
    """Of the earlier runs of the same stage the one whose key differs in the fewest places, the latest of equals."""
    same_stage = [record for record in earlier if record.key_parts.get("stage") == parts["stage"]]
    return min(same_stage, key=lambda record: (len(changes(record.key_parts, parts)), _age(record)), default=None)


def changes(before: Any, after: Any, path: str = "") -> list[str]:
    """The leaves in which two nested structures differ, as ``path: old → new``."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines: list[str] = []
        for name in sorted(before.keys() | after.keys()):
            inner = f"{path}.{name}" if path else name
            if name not in before or name not in after:
                lines.append(f"{inner} {'added' if name in after else 'removed'}")
            else:
                lines += changes(before[name], after[name], inner)
        return lines
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            line for i, pair in enumerate(zip(before, after, strict=True)) for line in changes(*pair, f"{path}.{i}")
        ]
    return [] if before == after else [f"{path}: {_short(before)} → {_short(after)}"]


def _short(value: Any) -> str:
    text = str(value)
    if "@sha256:" in text:
        kind, _, digest = text.partition("@sha256:")
        return f"{kind}@{digest[:8]}"
    return text if len(text) <= 24 else text[:8] + "…"


def _age(record: Provenance) -> float:
    """Smaller for later runs."""
    from datetime import datetime

    return -datetime.fromisoformat(record.finished_at).timestamp() if record.finished_at else 0.0
