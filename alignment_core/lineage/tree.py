"""Trees of a lineage graph: all that an artifact was made from, or that was made from it, and what of it is worth showing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from alignment_core.artifacts import Provenance, Reference
from alignment_core.artifacts.reference import BATCH
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.place import Place, place_of
from alignment_core.lineage.sources import Source, sources_of

FIRST, LAST = 2, 1
"""Of generations, and of artifacts at one place: how many at each end are shown."""
LEAST_LEFT_OUT = 2


@dataclass(frozen=True)
class Branch:
    """An edge of a tree. ``role``: the role in which the later artifact used the earlier one. ``repeated``: the artifact has
    its branches elsewhere in the tree."""

    role: str
    reference: Reference
    repeated: bool


@dataclass(frozen=True)
class Node:
    """An artifact of a tree, with all records of it. ``sources``, in upward trees: those outside the store that its makers
    read."""

    reference: Reference
    made_by: tuple[Provenance, ...]
    branches: tuple[Branch, ...]
    sources: tuple[Source, ...]

    @cached_property
    def place(self) -> Place | None:
        return place_of(self.made_by[0]) if self.made_by else None


@dataclass(frozen=True)
class Gap:
    """Artifacts that are left out of a tree. ``then``: the last one of a chain, which is shown after them."""

    count: int
    what: str
    then: Branch | None = None


class Tree:
    """Everything that the artifact ``root`` was made from (``upward``), or that was made from it. Each artifact is in it once,
    at its shortest distance from the root, so that a chain of hundreds of nights is no deeper than their number."""

    def __init__(self, graph: Graph, root: Reference, upward: bool) -> None:
        self.root = root
        self.upward = upward
        self.nodes: dict[Reference, Node] = {}
        """The nearest first."""
        self._before: dict[Reference, Reference] = {}
        """The next artifact towards the root."""
        waiting, seen = deque([root]), {root}
        while waiting:
            here = waiting.popleft()
            branches = []
            for role, reference in graph.parents(here) if upward else graph.children(here):
                branches.append(Branch(role, reference, reference in seen))
                if reference not in seen:
                    seen.add(reference)
                    waiting.append(reference)
                    self._before[reference] = here
            made_by = graph.made_by(here)
            sources = (source for record in made_by for source in sources_of(record)) if upward else ()
            self.nodes[here] = Node(here, made_by, tuple(branches), tuple(dict.fromkeys(sources)))

    @property
    def unit(self) -> str:
        """What a chain of artifacts at the same place is made of."""
        records = [record for node in self.nodes.values() for record in node.made_by]
        if any(record.stage == BATCH for record in records):
            return "nights"
        return "rounds" if len({record.run_ids.get("prefect") for record in records}) < 2 else "generations"

    def shown(self, reference: Reference) -> list[Branch | Gap]:
        """The branches of an artifact, without the middle of long chains and of many artifacts at the same place."""
        branches: list[Branch | Gap] = []
        groups: dict[tuple[str, Place | None] | Branch, list[Branch]] = defaultdict(list)
        for branch in self.nodes[reference].branches:
            place = self.nodes[branch.reference].place
            groups[branch if place is None or branch.repeated else (branch.role, place)].append(branch)
        for group in groups.values():
            if len(group) < FIRST + LAST + LEAST_LEFT_OUT:
                branches += map(self._without_middle, group)
                continue
            gap = Gap(len(group) - FIRST - LAST, "more like these")
            branches += [*map(self._without_middle, group[:FIRST]), gap, *map(self._without_middle, group[-LAST:])]
        return branches

    def _without_middle(self, branch: Branch) -> Branch | Gap:
        generation = self._generations.get(branch.reference)
        if branch.repeated or generation != FIRST:
            return branch
        last = self._last_generation(branch.reference)
        count = self._generations[last] - FIRST
        if count < LEAST_LEFT_OUT:
            return branch
        before = self.nodes[self._before[last]]
        role = next(onward.role for onward in before.branches if onward.reference == last)
        return Gap(count, f"{self.unit} between", Branch(role, last, repeated=False))

    @cached_property
    def _generations(self) -> dict[Reference, int]:
        """How many artifacts at the same place are between an artifact and the root, where there is any chain of them."""
        previous, numbers = self._previous, dict[Reference, int]()
        for reference in self.nodes:  # the nearest first
            before = previous.get(reference)
            numbers[reference] = 0 if before is None else numbers[before] + 1
        return numbers

    @cached_property
    def _previous(self) -> dict[Reference, Reference]:
        """The nearest artifact at the same place towards the root."""
        previous: dict[Reference, Reference] = {}
        # By place, the nearest one towards the root, inclusive: of each artifact, from that of the next one towards the root.
        nearest: dict[Reference, dict[Place, Reference]] = {}
        for reference, node in self.nodes.items():
            inherited = nearest[self._before[reference]] if reference in self._before else {}
            if node.place is None:
                nearest[reference] = inherited
                continue
            if node.place in inherited:
                previous[reference] = inherited[node.place]
            nearest[reference] = inherited | {node.place: reference}
        return previous

    def _last_generation(self, reference: Reference) -> Reference:
        """The farthest artifact of the chain that goes through an artifact."""
        later: dict[Reference, list[Reference]] = defaultdict(list)
        for onward, before in self._previous.items():
            later[before].append(onward)
        last, waiting = reference, [reference]
        while waiting:
            here = waiting.pop()
            if self._generations[here] > self._generations[last]:
                last = here
            waiting += later[here]
        return last

    def visible(self) -> Iterator[Reference]:
        """The artifacts of the tree that :meth:`shown` leads to from the root."""
        waiting = [self.root]
        while waiting:
            here = waiting.pop()
            yield here
            for entry in self.shown(here):
                branch = entry.then if isinstance(entry, Gap) else entry
                if branch is not None and not branch.repeated:
                    waiting.append(branch.reference)
