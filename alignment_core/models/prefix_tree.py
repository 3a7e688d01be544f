"""Token sequences laid out one behind the other; where several begin alike, their beginning lies there once.

The layout is a forest of prefix trees: a node is a run of tokens, and its children continue it. Nodes lie in depth-first
order, so that all that continues a node lies right behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 16
"""Tokens of a node that sequences share, at least: a shorter one costs more calls of the attention than it saves tokens."""


class Node(NamedTuple):
    """Tokens ``start`` to ``end`` of a layout. Each is seen by itself, by the node's later tokens, and by all that
    continues the node: the tokens from ``end`` to ``last``."""

    start: int
    end: int
    last: int


@dataclass(frozen=True)
class Layout:
    """N tokens, in which S sequences lie."""

    ids: np.ndarray
    """[N] int64"""
    positions: np.ndarray
    """[N] int64: each token's place in the sequences that it belongs to."""
    uses: np.ndarray
    """[N] int64: how many sequences each token belongs to."""
    nodes: tuple[Node, ...]
    places: tuple[np.ndarray, ...]
    """Of each sequence [T] int64: where its tokens lie."""
    width: int = 0
    """Of lines, if there are several."""


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """With how many equal tokens two sequences begin."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def by_prefix(sequences: Sequence[np.ndarray]) -> list[int]:
    """The numbers of the sequences in lexicographic order: none shares more with another than with its neighbours."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def lay_out(sequences: Sequence[np.ndarray]) -> Layout:
    """The layout of these sequences, of which none is empty."""
    order = by_prefix(sequences)
    shared = [shared_tokens(sequences[one], sequences[other]) for one, other in pairwise(order)]

    def children(first: int, end: int, depth: int, parent: int) -> list[tuple[int, int, int, int]]:
        """The sequences ``first`` to ``end`` of the order, by what they have in common beyond ``depth`` tokens."""
        cuts = [number + 1 for number in range(first, end - 1) if shared[number] < depth + LEAST_SHARED]
        return [(begin, until, depth, parent) for begin, until in pairwise([first, *cuts, end])]

    starts, parents = [0], list[int]()  # by node; ``starts`` with the end of the last
    parts: list[np.ndarray] = []
    uses: list[np.ndarray] = []
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
            uses.append(np.full(common - depth, end - first))
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
        uses=np.concatenate(uses),
        nodes=tuple(Node(*one) for one in zip(starts[:-1], starts[1:], last, strict=True)),
        places=tuple(np.concatenate(one) for one in places),
    )
