"""Agreement of annotators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


def krippendorff_alpha(units: Iterable[Collection[str]]) -> float | None:
    """Krippendorff's alpha for nominal categories: 1 for full agreement, 0 for what chance gives.

    A unit holds the categories that its annotators gave; those who gave none are not in it. None if no unit has two, or if all
    are of one category, where alpha is undefined. Source: Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011).
    """
    rated = [Counter(unit) for unit in units if len(unit) > 1]
    totals = sum(rated, Counter[str]())
    count = totals.total()
    expected = sum(number * (count - number) for number in totals.values())
    if not expected:
        return None
    disagreements = (
        sum(number * (unit.total() - number) for number in unit.values()) / (unit.total() - 1) for unit in rated
    )
    return 1 - (count - 1) * sum(disagreements) / expected
