"""Accuracy of the best of n completions by reward, over all choices of n among the sampled ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import comb


def chance_right(rewards: Sequence[float], right: Sequence[bool], n: int) -> float:
    """Probability that the completion with the highest reward among ``n`` is right.

    The n are drawn without replacement; ties are broken uniformly. The best of n among N completions has one of the ranks a to
    b - 1 (0 is the best) with probability ``(C(N - a, n) - C(N - b, n)) / C(N, n)``. Raises ValueError for fewer than n.
    """
    count = len(rewards)
    if not 1 <= n <= count:
        raise ValueError(f"the best of {n} among {count} completions")
    ranked = sorted(zip(rewards, right, strict=True), key=lambda pair: -pair[0])
    chance = 0.0
    before = 0
    for _, tied in groupby(ranked, key=lambda pair: pair[0]):
        truths = [truth for _, truth in tied]
        after = before + len(truths)
        chosen = comb(count - before, n) - comb(count - after, n)
        chance += chosen / comb(count, n) * sum(truths) / len(truths)
        before = after
    return chance
