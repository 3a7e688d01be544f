"""Selection of the best scored completions of a prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from alignment_core.errors import NumericError
from alignment_core.recipes.sections.rejection_sampling import BestConfig


def lowest_kept(scores: Sequence[float], config: BestConfig) -> float:
    """The minimum score of completions to keep, of a round with these ``scores``; −∞ for no minimum. Raises NumericError for a
    score that is not finite."""
    if not all(map(math.isfinite, scores)):
        raise NumericError(
            f"{sum(not math.isfinite(score) for score in scores)} of {len(scores)} scores are not finite"
        )
    bounds = [-math.inf]
    if config.min_score is not None:
        bounds.append(config.min_score)
    if config.strategy == "threshold" and config.threshold is not None:
        bounds.append(config.threshold)
    if config.strategy == "threshold" and config.quantile is not None and scores:
        bounds.append(float(np.quantile(np.asarray(scores), config.quantile)))
    return max(bounds)


def select_best(
    scores: Sequence[float], completions: Sequence[Hashable], lowest: float, most: int | None
) -> tuple[list[int], Counter[str]]:
    """Indices of the completions of one prompt to keep, the best first, and the number of others by reason.

    The reasons are ``low_score`` (below ``lowest``), ``duplicate`` (equal to a better or earlier one) and ``not_best``
    (``most`` others are better, or as good and earlier). ``completions`` are only compared for equality.
    """
    kept: list[int] = []
    seen: set[Hashable] = set()
    dropped: Counter[str] = Counter()
    for number in sorted(range(len(scores)), key=lambda one: (-scores[one], one)):
        if scores[number] < lowest:
            dropped["low_score"] += 1
        elif completions[number] in seen:
            dropped["duplicate"] += 1
        else:
            seen.add(completions[number])
            kept.append(number)
    if most is not None and len(kept) > most:
        dropped["not_best"] = len(kept) - most
    return kept[:most], dropped
