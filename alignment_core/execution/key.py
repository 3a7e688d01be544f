"""The key of a stage call: what decides its result, as one hash."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from alignment_core.canonical import canonical_json, derive_seed, digest_of
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.execution.base import StageCall
from alignment_core.execution.reasons import changes
from alignment_core.source_code import PACKAGE, PARSING, ROOT, code_digest
from alignment_core.user_code.counted import counting, edited

log = logging.getLogger(__name__)


def _stamps() -> dict[str, tuple[int, int]]:
    """Time and size of every source file of the package."""
    found = {}
    for folder, _, names in os.walk(ROOT / PACKAGE):  # with plain strings: it is asked for at each key
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            stat = os.stat(path)
            found[path.removeprefix(f"{ROOT}{os.sep}")] = (stat.st_mtime_ns, stat.st_size)
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
    parts = {
        **{name: value for name, value in optional.items() if value},
        "stage": stage.name,
        "version": stage.version,
        "config": stage.config.model_validate(call.config).content(),
        "inputs": {role: str(reference) for role, reference in sorted(call.inputs.items())},
        "seed": call.seed,
        "code": code,
    }
    return json.loads(canonical_json(parts))  # as records hold it, which it is compared with


def stage_key(call: StageCall) -> str:
    """SHA-256 of :func:`key_parts`: equal in every process, on every machine with the same code."""
    return digest_of(key_parts(call))


def check_key(call: StageCall, parts: dict[str, Any], files: dict[str, str]) -> None:
    """Raise UserError if the key is not what it was when it was computed from ``files`` (see ``counting``): nobody could say
    which version made the result. Raises EnvironmentFault as check_source does.

    That it cannot be computed now, where none of the files was edited, is no reason to lose a result: a user's ``content``
    may ask a service that is away.
    """
    check_source()
    changed: str | None
    try:
        with counting():  # these are not to be taken for those of then
            found = key_parts(call)
    except Exception as error:  # the user's code runs here
        changed = next(edited(files), None)
        if changed is None:
            log.warning("%s: its key cannot be computed again, and its files are what they were: %s", call.label, error)
    else:
        differs = digest_of(found) != digest_of(parts)
        changed = (next(edited(files), None) or "; ".join(changes(parts, found))) if differs else None
    if changed is not None:
        raise UserError(
            f"{changed} changed while {call.label} ran, so its result could not be told from that of the other version: run "
            "it again; finished stages are kept"
        )


def stage_seed(call: StageCall) -> int:
    """The seed of a stage: it follows from the recipe's, what the stage is, and its stream.

    Neither its settings nor its inputs are in it, so that two recipes that differ in one setting share all other noise.
    """
    return derive_seed(call.seed, call.stage, call.stream)
