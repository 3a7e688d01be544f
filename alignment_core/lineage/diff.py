"""Differences between two artifacts, and between the stages that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from pydantic import BaseModel

from alignment_core.artifacts import Manifest, Provenance, Reference, Store
from alignment_core.execution.cache_miss import changes, in_words


class Side(BaseModel):
    """One of the two artifacts; the stage is empty for an import."""

    reference: Reference
    stage: str = ""
    label: str = ""
    """With the output's name if the stage has several."""
    finished_at: str = ""


class Pair(BaseModel):
    """Two values of one name; None if a side has none. ``difference`` is b − a, for numbers."""

    name: str
    a: Any
    b: Any
    difference: float | None = None


class FileChange(BaseModel):
    """A file that differs between the sides; size (bytes) and digest are None if it is missing."""

    path: str
    size_a: int | None
    size_b: int | None
    sha256_a: str | None
    sha256_b: str | None


class Upstream(BaseModel):
    """Two corresponding earlier stages, and the differences between their keys, without inputs."""

    role: str
    """The roles on the path to them, such as ``data.rollouts``."""
    a: Side
    b: Side
    key: list[str]


class Difference(BaseModel):
    """The whole comparison. ``metrics`` and ``cost`` hold every name, the other lists only differences."""

    a: Side
    b: Side
    identical: bool
    """Whether both have the same bytes; the costs of their stages may still differ."""
    key: list[str]
    """The parts of the stages' keys that differ, except inputs."""
    inputs: list[Pair]
    """By role."""
    upstream: list[Upstream]
    """Earlier stages whose keys differ, from the nearest to the farthest."""
    metrics: list[Pair]
    cost: list[Pair]
    packages: list[Pair]
    hardware: list[Pair]
    """Hardware of the stages that can change rounding; it is in no key."""
    files: list[FileChange]


def compare(store: Store, a: Reference, b: Reference) -> Difference:
    """Compare two artifacts of a store, pruned ones too, by their manifests and records. Raises NotFound."""
    first, second = store.manifest(a), store.manifest(b)
    made_a, made_b = _nearest(store.records.makers(a), store.records.makers(b))
    return Difference(
        a=_side(a, made_a),
        b=_side(b, made_b),
        identical=a == b,
        key=_key_changes(made_a, made_b) if made_a and made_b else [],
        upstream=list(_upstream(store, made_a, made_b)) if made_a and made_b else [],
        inputs=_differing(_inputs(made_a), _inputs(made_b)),
        metrics=_pairs(_flat(made_a.metrics if made_a else {}), _flat(made_b.metrics if made_b else {})),
        cost=_pairs(_cost(made_a), _cost(made_b)),
        packages=_differing(made_a.packages if made_a else {}, made_b.packages if made_b else {}),
        hardware=_differing(made_a.hardware, made_b.hardware) if made_a and made_b else [],
        files=list(_files(first, second)),
    )


def _key_changes(a: Provenance, b: Provenance) -> list[str]:
    return in_words(changes(_key_parts(a), _key_parts(b)), b.label)


def _upstream(store: Store, a: Provenance, b: Provenance) -> Iterator[Upstream]:
    """Breadth first along the roles whose artifacts differ; each pair of stages once."""
    waiting = deque([("", a, b)])
    seen = {(a.key, b.key)}
    while waiting:
        path, left, right = waiting.popleft()
        for role in [role for role in left.inputs if role in right.inputs and left.inputs[role] != right.inputs[role]]:
            pair = _nearest(store.records.makers(left.inputs[role]), store.records.makers(right.inputs[role]))
            first, second = pair
            if first is None or second is None or (first.key, second.key) in seen:
                continue
            seen.add((first.key, second.key))
            name = f"{path}.{role}" if path else role
            waiting.append((name, first, second))
            if changed := _key_changes(first, second):
                sides = {"a": _side(left.inputs[role], first), "b": _side(right.inputs[role], second)}
                yield Upstream(role=name, **sides, key=changed)


def _nearest(a: list[Provenance], b: list[Provenance]) -> tuple[Provenance | None, Provenance | None]:
    """The most similar pair of makers, since several stages may have made the same bytes."""
    if not a or not b:
        return next(iter(a), None), next(iter(b), None)
    return min(product(a, b), key=lambda pair: len(changes(pair[0].key_parts, pair[1].key_parts)))


def _side(reference: Reference, record: Provenance | None) -> Side:
    if record is None:
        return Side(reference=reference)
    label = ", ".join(record.labels_of(reference))
    return Side(reference=reference, stage=record.stage, label=label, finished_at=record.finished_at)


def _key_parts(record: Provenance) -> dict[str, Any]:
    return {name: value for name, value in record.key_parts.items() if name != "inputs"}


def _inputs(record: Provenance | None) -> dict[str, str]:
    return {role: str(reference) for role, reference in record.inputs.items()} if record else {}


def _cost(record: Provenance | None) -> dict[str, float]:
    return {"seconds": record.seconds, **record.cost} if record else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        flat |= inner
    return flat


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Pair]:
    """Every name of either side, in the order of the first."""
    pairs = []
    for name in dict.fromkeys([*a, *b]):
        left, right = a.get(name), b.get(name)
        pairs.append(Pair(name=name, a=left, b=right, difference=_difference(left, right)))
    return pairs


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Pair]:
    return [pair for pair in _pairs(a, b) if pair.a != pair.b]


def _difference(a: Any, b: Any) -> float | None:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return b - a if numbers else None


def _files(a: Manifest, b: Manifest) -> Iterator[FileChange]:
    first, second = ({entry.path: entry for entry in manifest.files} for manifest in (a, b))
    for path in sorted(first.keys() | second.keys()):
        left, right = first.get(path), second.get(path)
        if left != right:
            yield FileChange(
                path=path,
                size_a=left.size if left else None,
                size_b=right.size if right else None,
                sha256_a=left.sha256 if left else None,
                sha256_b=right.sha256 if right else None,
            )
