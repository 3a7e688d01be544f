"""The lineage graph: artifacts and the stages between them, derived from the provenance records alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.artifacts.paths import STAGES
from alignment_core.lineage.sources import Source, sources_of


@dataclass(frozen=True)
class Node:
    """An artifact in a tree, reached from its neighbour by an edge.

    ``role`` is the edge: the role in which the later artifact used the earlier one, empty at the root. ``made_by``
    are all records of this artifact. ``sources``, in upward trees: the sources outside the store that its makers read.
    ``repeated``: the artifact occurs earlier in this tree, with its subtree.
    """

    reference: Reference
    role: str
    made_by: tuple[Provenance, ...]
    children: tuple[Node, ...] = ()
    sources: tuple[Source, ...] = ()
    repeated: bool = False


class Edges(Protocol):
    """The stages that made an artifact, and the stages that used it."""

    def makers(self, reference: Reference) -> Sequence[Provenance]: ...

    def users(self, reference: Reference) -> Sequence[Provenance]: ...


class Graph:
    """Artifacts and the records that made and used them."""

    def __init__(self, records: Iterable[Provenance]) -> None:
        self._edges: Edges = _Listed(records)
        self._made: dict[Reference, tuple[Provenance, ...]] = {}

    @classmethod
    @contextmanager
    def of(cls, store: Store) -> Iterator[Graph]:
        """The graph of a store as it is now, within the ``with``; records are read only when they are needed."""
        graph = cls(())
        with store.index.view(STAGES) as graph._edges:
            yield graph

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

    def descends(self, reference: Reference, ancestor: Reference) -> bool:
        """Whether ``reference`` was made from ``ancestor``, directly or not."""
        return any(parent == ancestor for _, parent in self.ancestors(reference))

    def up(self, reference: Reference) -> Node:
        """The tree of everything that ``reference`` was made from."""
        return self._tree(reference, "", True, set())

    def down(self, reference: Reference) -> Node:
        """The tree of everything that was made from ``reference``."""
        return self._tree(reference, "", False, set())

    def _tree(self, reference: Reference, role: str, upward: bool, shown: set[Reference]) -> Node:
        # Marking before the descent prints a shared subtree once, and would also end a cycle, which content
        # addressing rules out except where a stage returns one of its own inputs.
        made_by = self.made_by(reference)
        if reference in shown:
            return Node(reference, role, made_by, repeated=True)
        shown.add(reference)
        onward = self.parents(reference) if upward else self.children(reference)
        children = tuple(self._tree(child, edge, upward, shown) for edge, child in onward)
        sources = (source for record in made_by for source in sources_of(record)) if upward else ()
        return Node(reference, role, made_by, children, tuple(dict.fromkeys(sources)))


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


def _age(record: Provenance) -> tuple[str, str]:
    return record.started_at, record.key
