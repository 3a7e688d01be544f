"""Preference pairs from scored completions of one prompt. Completions that are equal, or have equal scores, form no pair."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence

from alignment_core.errors import NumericError
from alignment_core.recipes import SelectionConfig

ROUNDING = 1e-6
"""Scores are equal if they differ by no more, absolutely or relatively: sums of numbers in single precision do."""


def select_pairs(
    scores: Sequence[float], completions: Sequence[Hashable], config: SelectionConfig, rng: random.Random
) -> tuple[list[tuple[int, int]], str | None]:
    """Pairs (chosen, rejected) of indices into one prompt's completions, and the reason if there are none. ``completions`` are
    only compared for equality.

    The reason is ``identical`` (no two differ), ``tie`` (scores that are equal up to rounding), ``margin`` (smaller than
    ``min_margin``) or None; with several candidates, that of the largest margin. Raises NumericError for a score that is
    not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise NumericError(f"the scores {list(scores)} are not all finite, so that nothing can be chosen by them")
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if config.strategy == "best_random":
        others = [i for i in order[1:] if completions[i] != completions[order[0]]]
        candidates = [(order[0], rng.choice(others))] if others else []
    elif config.strategy == "random_pair":
        different = _different_pairs(order, completions)
        candidates = [rng.choice(different)] if different else []
    else:
        candidates = _widest_first(scores, completions, _different_pairs(order, completions))
    kept: list[tuple[int, int]] = []
    reasons: list[str] = []
    for chosen, rejected in candidates:
        margin = scores[chosen] - scores[rejected]
        if margin <= 0 or math.isclose(scores[chosen], scores[rejected], rel_tol=ROUNDING, abs_tol=ROUNDING):
            reasons.append("tie")
        elif margin < config.min_margin:
            reasons.append("margin")
        else:
            kept.append((chosen, rejected))
    limit = config.max_pairs_per_prompt if config.strategy == "all_pairs" else 1
    return kept[:limit], None if kept else next(iter(reasons), "identical")


def _different_pairs(order: Sequence[int], completions: Sequence[Hashable]) -> list[tuple[int, int]]:
    """All pairs of completions that differ, the better one first."""
    pairs = itertools.combinations(order, 2)
    return [(better, worse) for better, worse in pairs if completions[better] != completions[worse]]


def _widest_first(
    scores: Sequence[float], completions: Sequence[Hashable], pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The pairs by decreasing margin, those of equal completions once.

    Among pairs of equal margins those with the earlier chosen and the later rejected completion come first.
    """
    by_margin = sorted(pairs, key=lambda pair: (scores[pair[1]] - scores[pair[0]], pair[0], -pair[1]))
    first: dict[tuple[Hashable, Hashable], tuple[int, int]] = {}
    for chosen, rejected in by_margin:
        first.setdefault((completions[chosen], completions[rejected]), (chosen, rejected))
    return list(first.values())
