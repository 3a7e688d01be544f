"""Token sequences laid out one after the other, with each shared prefix once.

The layout is a forest of prefix trees: a node is a run of tokens, and its children continue it. Nodes lie in depth-first
order, so that all descendants of a node lie right after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16
"""Least tokens of a shared node: a shorter one would cost more in calls of the attention than it saves in tokens."""


class TreeNode(NamedTuple):
    """Tokens ``start`` to ``end`` of a layout. Each is seen by itself, by the node's later tokens, and by all descendants of
    the node: the tokens from ``end`` to ``last``."""

    start: int
    end: int
    last: int


@dataclass(frozen=True)
class Layout:
    """N tokens that hold S sequences."""

    ids: np.ndarray
    """[N] int64"""
    positions: np.ndarray
    """[N] int64: each token's position in its sequences."""
    multiplicity: np.ndarray
    """[N] int64: number of sequences that each token belongs to."""
    nodes: tuple[TreeNode, ...]
    places: tuple[np.ndarray, ...]
    """Of each sequence [T] int64: the indices of its tokens."""
    width: int = 0
    """Width of the lines, if there are several."""


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def by_prefix(sequences: Sequence[np.ndarray]) -> list[int]:
    """The numbers of the sequences in lexicographic order: each shares the longest prefix with a neighbour."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def lay_out(sequences: Sequence[np.ndarray], apart: bool = False) -> Layout:
    """The layout of these non-empty sequences; ``apart``: of each in a tree of its own."""
    order = by_prefix(sequences)
    neighbours = pairwise(order)
    shared = [0 if apart else shared_tokens(sequences[left], sequences[right]) for left, right in neighbours]

    def children(first: int, end: int, depth: int, parent: int) -> list[tuple[int, int, int, int]]:
        """The sequences ``first`` to ``end`` of the order, grouped by their common prefix beyond ``depth`` tokens."""
        cuts = [number + 1 for number in range(first, end - 1) if shared[number] < depth + LEAST_SHARED]
        return [(begin, until, depth, parent) for begin, until in pairwise([first, *cuts, end])]

    starts, parents = [0], list[int]()  # by node; ``starts`` with the end of the last
    parts: list[np.ndarray] = []
    multiplicity: list[np.ndarray] = []
    places: list[list[np.ndarray]] = [[] for _ in sequences]
    positions: list[np.ndarray] = []
    waiting = children(0, len(order), 0, -1)[::-1]
    while waiting:
        first, end, depth, parent = waiting.pop()
        ids = sequences[order[first]]
        common = min(shared[first : end - 1], default=len(ids))
        node = parent
        if common > depth:  # or the sequence ends where its parent does
            node, place = len(parents), starts[-1]
            starts.append(place + common - depth)
            parents.append(parent)
            parts.append(ids[depth:common])
            positions.append(np.arange(depth, common))
            multiplicity.append(np.full(common - depth, end - first))
            for number in order[first:end]:
                places[number].append(np.arange(place, starts[-1]))
        if end - first > 1:
            waiting += children(first, end, common, node)[::-1]
    last = starts[1:]
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            last[parents[node]] = max(last[parents[node]], last[node])
    return Layout(
        ids=np.concatenate(parts).astype(np.int64),
        positions=np.concatenate(positions),
        multiplicity=np.concatenate(multiplicity),
        nodes=tuple(map(TreeNode, starts[:-1], starts[1:], last)),
        places=tuple(map(np.concatenate, places)),
    )
