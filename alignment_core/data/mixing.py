"""In which order rows of several sources follow each other: a pure function of their counts and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from alignment_core.canonical import derive_seed

Stopping = Literal["first_exhausted", "all_exhausted"]


def order(
    counts: Sequence[int], weights: Sequence[float] | None, stopping: Stopping, shuffle: bool, seed: int
) -> list[tuple[int, int]]:
    """Pairs (source, row). Sources without rows take no part.

    Without weights: every row once. With weights: the source of each row is drawn with these probabilities until
    the first source has given its last row, or, repeating those that run dry (in a new order), until every source has.
    """
    if weights is None:
        every = [(source, row) for source, count in enumerate(counts) for row in range(count)]
        if shuffle:
            Random(derive_seed(seed, "order")).shuffle(every)
        return every
    alive = [source for source, count in enumerate(counts) if count]
    if not alive:
        return []
    draw = Random(derive_seed(seed, "mixing"))
    chances = [weights[source] for source in alive]
    passes = dict.fromkeys(alive, 0)
    waiting = {source: _permutation(counts[source], shuffle, seed, source, 0) for source in alive}
    finished: set[int] = set()
    mixed: list[tuple[int, int]] = []
    while len(finished) < (1 if stopping == "first_exhausted" else len(alive)):
        source = draw.choices(alive, chances)[0]
        if not waiting[source]:
            passes[source] += 1
            waiting[source] = _permutation(counts[source], shuffle, seed, source, passes[source])
        mixed.append((source, waiting[source].pop()))
        if not waiting[source]:
            finished.add(source)
    return mixed


def _permutation(count: int, shuffle: bool, seed: int, source: int, repetition: int) -> list[int]:
    """Row numbers, the first one to be used at the end of the list."""
    rows = list(range(count))
    if shuffle:
        Random(derive_seed(seed, "order", source, repetition)).shuffle(rows)
    return rows[::-1]
