"""The metrics of a step, from what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alignment_core.training.learner import StepReport


def averages(reports: Sequence[dict[str, StepReport]]) -> dict[str, float]:
    """Of the learners' reports, rank by rank: losses over their normalisers, everything else over trained tokens."""
    metrics: dict[str, float] = {}
    for learner in reports[0]:
        ranks = [report[learner] for report in reports]
        sums = {name: sum(rank.sums.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank.sums}
        tokens = max(sums.pop("trained_tokens", 0.0), 1.0)
        normaliser = max(sum(rank.normaliser for rank in ranks), 1.0)
        prefix = "" if learner == "policy" else f"{learner}_"
        for name, value in sums.items():
            metrics[f"{prefix}{name}"] = value / (normaliser if name in ("loss", "aux_loss") else tokens)
        if ranks[0].steps:  # none of its own for what is mixed into another's steps
            metrics[f"{prefix}grad_norm"] = ranks[0].grad_norm
            metrics[f"{prefix}learning_rate"] = ranks[0].learning_rate
    return metrics
