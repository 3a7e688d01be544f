"""Differences between two artifacts, and between the stages that made them."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from pydantic import BaseModel

from alignment_core.artifacts import Manifest, Provenance, Reference, Store
from alignment_core.artifacts.index import View
from alignment_core.artifacts.paths import STAGES
from alignment_core.execution.cache_miss import changes, in_words
from alignment_core.lineage.place import Place, place_of

_ROUND = re.compile(r"round-(\d+)")


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
    relation: str = ""
    """How one follows the other, such as ``b is one round further, b was made from a``."""
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
    with store.index.view(STAGES) as view:
        return compare_in(view, first, second)


def compare_in(view: View, first: Manifest, second: Manifest) -> Difference:
    """Compare two artifacts by the records of a view."""
    a, b = first.reference, second.reference
    made_a, made_b = _nearest(view.makers(a), view.makers(b))
    histories = _Histories(view, a, b)
    upstream = list(histories.upstream(made_a, made_b)) if made_a and made_b else []
    return Difference(
        a=_side(a, made_a),
        b=_side(b, made_b),
        identical=a == b,
        relation=histories.relation(made_a, made_b),
        key=_key_changes(made_a, made_b) if made_a and made_b else [],
        upstream=upstream,
        inputs=_differing(_inputs(made_a), _inputs(made_b)),
        metrics=_pairs(flattened(made_a.metrics if made_a else {}), flattened(made_b.metrics if made_b else {})),
        cost=_pairs(_cost(made_a), _cost(made_b)),
        packages=_differing(made_a.packages if made_a else {}, made_b.packages if made_b else {}),
        hardware=_differing(made_a.hardware, made_b.hardware) if made_a and made_b else [],
        files=list(_files(first, second)),
    )


def _key_changes(a: Provenance, b: Provenance) -> list[str]:
    return in_words(changes(_key_parts(a), _key_parts(b)), b.label)


class _Histories:
    """Everything that two artifacts were made from."""

    def __init__(self, view: View, a: Reference, b: Reference) -> None:
        self.view = view
        self.a = a
        self.b = b
        self.behind_a = view.ancestors(a)
        self.behind_b = view.ancestors(b)
        self.later = defaultdict[Place, set[Reference]](set)
        """By place: artifacts of one history that the other one begins from, and what was made from them at the same place,
        such as a round's policy and those of later rounds. Nothing corresponds to them on the other side."""

    def relation(self, a: Provenance | None, b: Provenance | None) -> str:
        """How one side follows the other: by how many rounds of its run, and whether it was made from it."""
        rounds = _round_of(b.label) - _round_of(a.label) if a and b and place_of(a) == place_of(b) else 0
        sentences = []
        if rounds:
            count = "one round" if abs(rounds) == 1 else f"{abs(rounds)} rounds"
            sentences.append(f"{'b' if rounds > 0 else 'a'} is {count} further")
        if self.a in self.behind_b:
            sentences.append("b was made from a")
        if self.b in self.behind_a:
            sentences.append("a was made from b")
        return ", ".join(sentences)

    def upstream(self, a: Provenance, b: Provenance) -> Iterator[Upstream]:
        """Breadth first along the roles whose artifacts differ; each pair of stages once."""
        waiting = deque([("", a, b)])
        seen = {(a.key, b.key)}
        self._pass(_Corresponding(self.a, a, self.b, b))
        while waiting:
            path, left, right = waiting.popleft()
            for role in [name for name in left.inputs if name in right.inputs]:
                pair = self._corresponding(role, left, right)
                if pair is None or pair.keys in seen:
                    continue
                seen.add(pair.keys)
                self._pass(pair)
                name = f"{path}.{role}" if path else role
                waiting.append((name, pair.a, pair.b))
                if changed := _key_changes(pair.a, pair.b):
                    sides = {"a": _side(pair.from_a, pair.a), "b": _side(pair.from_b, pair.b)}
                    yield Upstream(role=name, **sides, key=changed)

    def _pass(self, pair: _Corresponding) -> None:
        for artifact, record, behind in ((pair.from_a, pair.a, self.behind_b), (pair.from_b, pair.b, self.behind_a)):
            if artifact in behind:
                self.later[place_of(record)] |= {artifact, *self.view.descendants(artifact)}

    def _corresponding(self, role: str, a: Provenance, b: Provenance) -> _Corresponding | None:
        """The stages at the same place of both histories behind a role; None if there are none, or both made one artifact.

        The first round of one run and the third of another have other models to start from: SFT's, and round 2's. So earlier
        makers of the same role are looked at, until one is at the place of the other side's.
        """
        left, right = self._back(role, a), self._back(role, b)
        first, second = next(left, None), next(right, None)
        if first is None or second is None:
            return None
        both = chain([(first, second)], ((first, older) for older in right), ((older, second) for older in left))
        for (from_a, makers_a), (from_b, makers_b) in both:
            if from_a == from_b:
                return None
            record_a, record_b = _nearest(makers_a, makers_b)
            if record_a and record_b and place_of(record_a) == place_of(record_b):
                return _Corresponding(from_a, record_a, from_b, record_b)
        return None

    def _back(self, role: str, record: Provenance) -> Iterator[tuple[Reference, list[Provenance]]]:
        """The artifact in a role of a stage, that in the same role of its maker, and so on, with their makers; those that are
        ``later`` end it."""
        seen = set[Reference]()
        waiting: Provenance | None = record
        while waiting is not None and (used := waiting.inputs.get(role)) is not None and used not in seen:
            seen.add(used)
            makers = self.view.makers(used)
            if any(used in self.later.get(place_of(maker), ()) for maker in makers):
                return
            yield used, makers
            waiting = makers[0] if makers else None


@dataclass(frozen=True)
class _Corresponding:
    """Stages at the same place of two histories, with the artifacts that they made."""

    from_a: Reference
    a: Provenance
    from_b: Reference
    b: Provenance

    @property
    def keys(self) -> tuple[str, str]:
        return self.a.key, self.b.key


def _round_of(label: str) -> int:
    numbers = _ROUND.findall(label)
    return int(numbers[-1]) if numbers else 0


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


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
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
