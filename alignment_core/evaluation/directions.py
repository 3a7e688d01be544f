"""The direction of every metric: whether a higher or a lower value is better."""

from __future__ import annotations

import re
from collections.abc import Mapping

STATED = ".higher_is_better"
"""Suffix of an entry beside a metric of lm-eval: 1 or 0, as its task defines."""
LOWER_IS_BETTER = frozenset(
    (
        *(
            "loss",
            "nll",
            "kl",
            "kl_to_model",
            "error",
            "perplexity",
            "reward_rejected",
            "reward_undesirable",
        ),  # of training
        *("length", "truncated", "position_changed", "failed_rewards", "unjudged_pairs"),  # of evaluations
        *("word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter"),  # of lm-eval
    )
)
_ENDINGS = ("_loss", "_nll", "_kl", "_error", "_perplexity")
"""Endings of metrics of other packages."""


def higher_is_better(name: str, metrics: Mapping[str, float] | None = None) -> bool:
    """Whether a higher value of the metric ``name`` is better.

    ``name`` may also be a held-out metric (``test_loss``), one before the first step, an end of an interval (``kl.high``) or a
    metric of lm-eval. ``metrics`` are those measured together with it; lm-eval states directions there.
    """
    base = re.sub(r"\.(low|high|first)$", "", name)
    if metrics is not None and (stated := metrics.get(base + STATED)) is not None:
        return stated > 0
    bare = base.rpartition("/")[2].partition("@")[0].removeprefix("test_")
    return bare not in LOWER_IS_BETTER and not bare.endswith(_ENDINGS)
