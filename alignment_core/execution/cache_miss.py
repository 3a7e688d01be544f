"""Why a stage runs: the changes of its key since the nearest earlier run, in terms of the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from alignment_core.artifacts import Provenance
from alignment_core.credentials import cut
from alignment_core.recipes.methods import decides

NAMES = {
    "code": "the code of alignment_core",
    "packages": "versions of packages",
    "version": "the version of the stage",
    "stream": "the random stream",
    "trust_remote_code": "model.trust_remote_code",
    "passed": "options of packages (resources.deepspeed, resources.engine_options)",
}

PASSED = {"vllm": "engine_options"}
"""Fields of `resources` with options for a package, where they have another name than the package."""
NAMED = 3
"""Changed modules that are named; further ones are counted."""
_CODE = re.compile(r"code\.([^: ]+)(?::| added$| removed$)")
_PACKAGE = re.compile(r"packages\.([^: ]+):? (.*)")
SHOWN = 24
"""Longest value that is shown whole."""


def why_it_runs(parts: dict[str, Any], earlier: Iterable[Provenance], label: str = "") -> str:
    """One line: the differences from the nearest earlier run of the same stage."""
    other = nearest(parts, earlier, label)
    if other is None:
        return "first run of this stage in this store"
    changed = in_words(changes(other.key_parts, parts), label)
    if not changed:
        return "its artifact is pruned, gone or damaged"
    shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
    return f"changed since {other.label}: {shown}"


def nearest(parts: dict[str, Any], earlier: Iterable[Provenance], label: str) -> Provenance | None:
    """The earlier run of the same stage whose key differs in the fewest entries, the latest of equals.

    Runs with the same label are preferred, then those of other rounds, then those with the same random stream, such as
    evaluations of different policies.
    """
    same = [record for record in earlier if record.key_parts.get("stage") == parts["stage"]]
    comparable: tuple[Callable[[Provenance], bool], ...] = (
        lambda record: record.label == label,
        lambda record: any_round(record.label) == any_round(label),
        lambda record: _stream(record.key_parts) == _stream(parts),
    )
    candidates = next(filter(None, (list(filter(fits, same)) for fits in comparable)), [])
    return min(
        candidates,
        key=lambda record: (len(in_words(changes(record.key_parts, parts), label)), _age(record)),
        default=None,
    )


def any_round(label: str) -> str:
    """A label that is the same in every round: a sign stands for each number."""
    return re.sub(r"\d+", "#", label)


def _stream(parts: dict[str, Any]) -> str:
    return any_round(parts.get("stream", ""))


def in_words(changed: Iterable[str], label: str) -> list[str]:
    """Changes of the key of the stage ``label``, with the recipe's fields in place of entries of the key where they are
    known."""
    words: list[str] = []
    code: list[str] = []
    for change in changed:
        if module := _CODE.match(change):
            code.append(module.group(1))
        elif package := _PACKAGE.match(change):
            words.append(" ".join(package.groups()))
        else:
            words.append(re.sub(r"^[^: ]+", lambda path: _field(path.group(), label), change))
    if not code:
        return words
    more = f" and {len(code) - NAMED} more modules" if len(code) > NAMED else ""
    return [*words, f"code of {', '.join(code[:NAMED])}{more} changed"]


def _field(path: str, label: str) -> str:
    first, _, rest = path.partition(".")
    if first == "inputs":
        return f"input {rest}"
    if first == "passed" and rest:
        package, _, option = rest.partition(".")
        return ".".join(filter(None, ("resources", PASSED.get(package, package), option)))
    if first != "config":
        return NAMES.get(path, path)
    if rest.endswith(".code"):
        rest = f"{rest.removesuffix('.code')} (its source)"
    return decides(label, rest) or path


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
    if isinstance(before, list) and isinstance(after, list):
        if len(before) == len(after):
            return [
                line for i, pair in enumerate(zip(before, after, strict=True)) for line in changes(*pair, f"{path}.{i}")
            ]
        if max(len(str(before)), len(str(after))) > SHOWN:
            return [f"{path}: {len(before)} → {len(after)} entries"]
    if isinstance(before, dict) != isinstance(after, dict):
        return [f"{path}: recorded in another form"]
    if before == after:
        return []
    name = path.rpartition(".")[2]
    # a record of an earlier version may hold a secret
    shown = (_short(cut({name: value})[name]) for value in (before, after))
    return [f"{path}: {' → '.join(shown)}"]


def _short(value: Any) -> str:
    text = str(value)
    if "@sha256:" in text:
        kind, _, digest = text.partition("@sha256:")
        return f"{kind}@{digest[:8]}"
    return text if len(text) <= SHOWN else text[:8] + "…"


def _age(record: Provenance) -> float:
    """Smaller for later runs."""
    return -datetime.fromisoformat(record.finished_at).timestamp() if record.finished_at else 0.0
