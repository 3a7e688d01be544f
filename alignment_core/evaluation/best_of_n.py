"""The best of n completions, over all choices of n among those that there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import comb


def chance_right(rewards: Sequence[float], right: Sequence[bool], n: int) -> float:
    """Chance that the completion with the highest reward among ``n`` is right, where the n are drawn from all of them without
    replacement and equal rewards are drawn lots for. Raises ValueError for fewer than n.

    Of N completions the best of n has one of the ranks a to b - 1 (from 0, the best first) with probability
    ``(C(N - a, n) - C(N - b, n)) / C(N, n)``.
    """
    count = len(rewards)
    if not 1 <= n <= count:
        raise ValueError(f"the best of {n} among {count} completions")
    ranked = sorted(zip(rewards, right, strict=True), key=lambda one: -one[0])
    chance, before = 0.0, 0
    for _, tied in groupby(ranked, key=lambda one: one[0]):
        truths = [truth for _, truth in tied]
        after = before + len(truths)
        chosen = comb(count - before, n) - comb(count - after, n)
        chance += chosen / comb(count, n) * sum(truths) / len(truths)
        before = after
    return chance
