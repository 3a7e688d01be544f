"""The lineage graph: artifacts and the stages between them, derived from the provenance records alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.artifacts.paths import STAGES


class Edges(Protocol):
    """The stages that made an artifact, and the stages that used it."""

    def makers(self, reference: Reference) -> Sequence[Provenance]: ...

    def users(self, reference: Reference) -> Sequence[Provenance]: ...

    def ancestors(self, reference: Reference) -> Collection[Reference]: ...

    def descendants(self, reference: Reference) -> Collection[Reference]: ...


class Graph:
    """Artifacts and the records that made and used them."""

    def __init__(self, records: Iterable[Provenance]) -> None:
        self._edges: Edges = _Listed(records)
        self._made: dict[Reference, tuple[Provenance, ...]] = {}

    @classmethod
    @contextmanager
    def of(cls, store: Store) -> Iterator[Graph]:
        """The graph of a store as it is now, within the ``with``; records are read only when they are needed."""
        with store.index.view(STAGES) as view:
            yield cls.over(view)

    @classmethod
    def over(cls, edges: Edges) -> Graph:
        """The graph of an open view of a store."""
        graph = cls(())
        graph._edges = edges
        return graph

    def made_by(self, reference: Reference) -> tuple[Provenance, ...]:
        """The records that name ``reference`` among their outputs, oldest first; empty for an imported artifact."""
        if reference not in self._made:
            self._made[reference] = tuple(sorted(self._edges.makers(reference), key=_age))
        return self._made[reference]

    def used_by(self, reference: Reference) -> tuple[tuple[str, Provenance], ...]:
        """(role, record) of every stage that used ``reference``, oldest first."""
        users = sorted(self._edges.users(reference), key=_age)
        return tuple(
            (role, record) for record in users for role, used in sorted(record.inputs.items()) if used == reference
        )

    def parents(self, reference: Reference) -> list[tuple[str, Reference]]:
        """(role, artifact) of everything that the stages behind ``reference`` used, each pair once."""
        pairs = (pair for record in self.made_by(reference) for pair in sorted(record.inputs.items()))
        return list(dict.fromkeys(pairs))

    def children(self, reference: Reference) -> list[tuple[str, Reference]]:
        """(role, artifact) of everything that was made from ``reference``, each pair once."""
        pairs = ((role, output) for role, record in self.used_by(reference) for output in record.outputs.values())
        return list(dict.fromkeys(pairs))

    def ancestors(self, reference: Reference) -> Iterator[tuple[str, Reference]]:
        """(role, artifact) of everything that ``reference`` was made from, directly or not; a pair may come several times."""
        waiting, seen = [reference], {reference}
        while waiting:
            for role, parent in self.parents(waiting.pop()):
                yield role, parent
                if parent not in seen:
                    waiting.append(parent)
                    seen.add(parent)

    def behind(self, reference: Reference) -> Collection[Reference]:
        """Everything that an artifact was made from, directly or not."""
        return self._edges.ancestors(reference)

    def made_from(self, reference: Reference) -> Collection[Reference]:
        """Everything that was made from an artifact, directly or not."""
        return self._edges.descendants(reference)

    def descends(self, reference: Reference, ancestor: Reference) -> bool:
        """Whether ``reference`` was made from ``ancestor``, directly or not."""
        return ancestor in self.behind(reference)


class _Listed:
    """The edges of a list of records."""

    def __init__(self, records: Iterable[Provenance]) -> None:
        self._makers: defaultdict[Reference, list[Provenance]] = defaultdict(list)
        self._users: defaultdict[Reference, list[Provenance]] = defaultdict(list)
        for record in records:
            for output in dict.fromkeys(record.outputs.values()):
                self._makers[output].append(record)
            for used in dict.fromkeys(record.inputs.values()):
                self._users[used].append(record)

    def makers(self, reference: Reference) -> Sequence[Provenance]:
        return self._makers.get(reference, ())

    def users(self, reference: Reference) -> Sequence[Provenance]:
        return self._users.get(reference, ())

    def ancestors(self, reference: Reference) -> Collection[Reference]:
        return _reached(
            reference, lambda here: (used for record in self.makers(here) for used in record.inputs.values())
        )

    def descendants(self, reference: Reference) -> Collection[Reference]:
        return _reached(
            reference, lambda here: (made for record in self.users(here) for made in record.outputs.values())
        )


def _reached(start: Reference, onward: Callable[[Reference], Iterable[Reference]]) -> set[Reference]:
    """Everything that a step ``onward`` leads to, without the start."""
    waiting, reached = [start], {start}
    while waiting:
        new = set(onward(waiting.pop())) - reached
        reached |= new
        waiting.extend(new)
    return reached - {start}


def _age(record: Provenance) -> tuple[str, str]:
    return record.started_at, record.key
