"""The rewards of a step as metrics: each one by its name, and how many completions have none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from alignment_core.recipes.sections.rewards import RewardConfig, reward_names
from alignment_core.rollout.advantages import Samples


def reward_metrics(samples: Samples, rewards: Sequence[RewardConfig], found: Mapping[str, float]) -> dict[str, float]:
    """``rewards/<name>/mean`` and ``/std`` (with the divisor n - 1, as in TRL) of each reward over the completions with it,
    in place of ``reward_<number>`` in what was ``found``; and ``reward/missing_share``, the share of completions without a
    reward. A single completion has no deviation."""
    metrics = {name: value for name, value in found.items() if not re.fullmatch(r"reward_\d+", name)}
    for number, name in enumerate(reward_names(rewards)):
        given = [row["rewards"][number] for row in samples if row["rewards"][number] is not None]
        if given:
            metrics[f"rewards/{name}/mean"] = float(np.mean(given))
        if len(given) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(given, ddof=1))
    metrics["reward/missing_share"] = sum(row["failures"] is not None for row in samples) / len(samples)
    return metrics
