"""Mixing: the order of rows follows from counts, weights and seed, and from nothing else."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from alignment_core.data.mixing import order

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31 - 1)


@given(COUNTS, SEEDS, st.booleans())
def test_without_weights_every_row_comes_once(counts: list[int], seed: int, shuffle: bool) -> None:
    mixed = order(counts, None, "first_exhausted", shuffle, seed)
    assert sorted(mixed) == [(source, row) for source, count in enumerate(counts) for row in range(count)]
    assert shuffle or mixed == sorted(mixed)


@given(COUNTS, SEEDS, st.booleans())
def test_same_seed_gives_the_same_order(counts: list[int], seed: int, shuffle: bool) -> None:
    for mode in ("first_exhausted", "all_exhausted"):
        first, second = (order(counts, [1.0] * len(counts), mode, shuffle, seed) for _ in range(2))  # type: ignore[arg-type]
        assert first == second


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), SEEDS)
def test_first_exhausted_ends_with_the_last_row_of_a_source_and_repeats_none(counts: list[int], seed: int) -> None:
    mixed = order(counts, [1.0] * len(counts), "first_exhausted", True, seed)
    used = Counter(source for source, _ in mixed)
    assert len(set(mixed)) == len(mixed)
    assert [source for source, count in enumerate(counts) if used[source] == count] == [mixed[-1][0]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), SEEDS)
def test_all_exhausted_reads_every_row_and_repeats_evenly(counts: list[int], seed: int) -> None:
    mixed = order(counts, [1.0] * len(counts), "all_exhausted", True, seed)
    times = Counter(mixed)
    for source, count in enumerate(counts):
        seen = [times[source, row] for row in range(count)]
        assert min(seen) >= 1
        assert max(seen) - min(seen) <= 1


def test_weights_are_probabilities() -> None:
    mixed = order([10_000, 10_000], [3.0, 1.0], "first_exhausted", True, 0)
    share = sum(source == 0 for source, _ in mixed) / len(mixed)
    assert abs(share - 0.75) < 0.02  # standard deviation 0.004


def test_without_shuffling_each_source_keeps_its_own_order() -> None:
    mixed = order([20, 20], [1.0, 1.0], "first_exhausted", False, 0)
    for source in (0, 1):
        rows = [row for origin, row in mixed if origin == source]
        assert rows == sorted(rows)
