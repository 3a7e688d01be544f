"""The key of a stage call: what decides its result, as one hash, and what changed since an earlier call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from alignment_core.artifacts import Provenance
from alignment_core.canonical import derive_seed, digest_of
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.evaluation.user_code import counting, edited
from alignment_core.source_code import PACKAGE, PARSING, ROOT, code_digest
from alignment_core.stages.base import StageCall


def _stamps() -> dict[str, tuple[int, int]]:
    """Time and size of every source file of the package."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
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
            f"{changed[0]} changed since this run started, so its results could not be told from those of the "
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


def check_key(call: StageCall, parts: dict[str, Any], files: dict[str, str]) -> None:
    """Raise UserError if the key is not what it was when it was computed from ``files`` (see ``counting``): nobody could say
    which version made the result. Raises EnvironmentFault as check_source does."""
    try:
        with counting():  # these are not to be taken for those of then
            found = key_parts(call)
    except UserError as error:
        found = {"config": str(error)}
    if digest_of(found) == digest_of(parts):
        return
    what = next(edited(files), None) or "; ".join(changes(parts, found))
    raise UserError(
        f"{what} changed while {call.label} ran, so its result could not be told from that of the other version: run it "
        "again; finished stages are kept"
    )


def stage_seed(call: StageCall) -> int:
    """The seed of a stage: it follows from the recipe's, what the stage is, and its stream.

    Neither its settings nor its inputs are in it, so that two recipes that differ in one setting share all other noise.
    """
    return derive_seed(call.seed, call.stage, call.stream)


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
