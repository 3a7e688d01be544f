"""Preference pairs from scored completions of one prompt. Ties are never pairs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence

from alignment_core.errors import NumericError
from alignment_core.recipes import SelectionConfig


def select_pairs(
    scores: Sequence[float], completions: Sequence[Hashable], config: SelectionConfig, rng: random.Random
) -> tuple[list[tuple[int, int]], str | None]:
    """Pairs (chosen, rejected) of indices into one prompt's completions, and why there are none. Of ``completions`` only
    matters which are equal.

    The reason is ``identical`` (the tokens are the same), ``tie`` (equal scores), ``margin`` (less apart than
    ``min_margin``) or None; with several candidates, that of the widest apart. Raises NumericError for a score that is
    not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise NumericError(f"the scores {list(scores)} are not all finite, so that nothing can be chosen by them")
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if config.strategy == "best_worst":
        candidates = [(order[0], order[-1])]
    elif config.strategy == "best_random":
        candidates = [(order[0], rng.choice(order[1:]))] if len(order) > 1 else []
    elif config.strategy == "random_pair":
        first, second = sorted(rng.sample(range(len(order)), 2)) if len(order) > 1 else (0, 0)
        candidates = [(order[first], order[second])]
    else:
        candidates = list(itertools.combinations(order, 2))
        candidates.sort(key=lambda pair: (scores[pair[1]] - scores[pair[0]], pair))
    kept: list[tuple[int, int]] = []
    reasons: list[str] = []
    for chosen, rejected in candidates:
        margin = scores[chosen] - scores[rejected]
        if completions[chosen] == completions[rejected]:
            continue
        if margin <= 0:
            reasons.append("tie")
        elif margin < config.min_margin:
            reasons.append("margin")
        else:
            kept.append((chosen, rejected))
    limit = config.max_pairs_per_prompt if config.strategy == "all_pairs" else 1
    return kept[:limit], None if kept else next(iter(reasons), "identical")
