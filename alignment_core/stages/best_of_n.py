"""Stage: scored completions → accuracy of the best of n by each reward, beside the upper bound for any reward."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from alignment_core.evaluation.best_of_n import chance_right
from alignment_core.evaluation.statistics import Interval, wilson
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.rollout.schemas import read_scores

SECTION = "section.md"
"""File of artifacts of the kind ``section``, which reports of runs show."""
ORACLE = "any right one"
NOTHING = "no completion has both a score of the verifier and all rewards"


class BestOfNConfig(StageConfig):
    """The rewards that choose. The input is the ``scores``."""

    rewards: tuple[str, ...]
    """Names of the rewards, in the order of the scores."""
    confidence: float = 0.95


def run(context: StageContext, config: BestOfNConfig) -> dict[str, Any]:
    prompts: dict[int, list[dict[str, Any]]] = {}
    for row in read_scores(context.inputs["scores"]):
        given = [row["reward"]] if len(config.rewards) == 1 else row["rewards"] or [None]
        if row["verifier"] is not None and None not in given:
            prompts.setdefault(row["prompt"], []).append({"right": row["verifier"] >= 1, "rewards": given})
    most = max(map(len, prompts.values()), default=0)
    sizes = [size for size in (2**power for power in range(most.bit_length())) if size <= most]
    choosers = {name: number for number, name in enumerate(config.rewards)} | {ORACLE: None}
    intervals = {
        name: {size: _measured(list(prompts.values()), number, size, config.confidence) for size in sizes}
        for name, number in choosers.items()
    }
    content = {name: {str(size): vars(interval) for size, interval in row.items()} for name, row in intervals.items()}
    (context.output / "best_of_n.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (context.output / SECTION).write_text(_markdown(intervals, sizes, len(prompts)))
    metrics: dict[str, Any] = {"prompts": len(prompts), "n": sizes[-1] if sizes else 0}
    if not sizes:
        return {**metrics, "warnings": [f"{NOTHING}: nothing was measured"]}
    for number, name in enumerate(config.rewards):
        metrics[f"best_{number}"] = intervals[name][sizes[-1]].mean
    return metrics


def _measured(prompts: list[list[dict[str, Any]]], reward: int | None, size: int, confidence: float) -> Interval:
    """Over the prompts with at least ``size`` completions. Without a ``reward`` a right one is chosen if possible."""
    chances = [
        chance_right(
            [float(row["right"]) if reward is None else row["rewards"][reward] for row in group],
            [row["right"] for row in group],
            size,
        )
        for group in prompts
        if len(group) >= size
    ]
    return wilson(np.asarray(chances), confidence)


def _markdown(intervals: dict[str, dict[int, Interval]], sizes: list[int], prompts: int) -> str:
    if not sizes:
        return f"## Best of n\n\n{NOTHING.capitalize()}.\n"
    head = ["chosen by", *(f"best of {size}" for size in sizes)]
    lines = ["## Best of n", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in intervals.items():
        cells = [f"{row[size].mean:.3f} [{row[size].low:.3f}, {row[size].high:.3f}]" for size in sizes]
        lines.append(f"| {' | '.join([name, *cells])} |")
    lines += [
        "",
        f"Share of {prompts} prompts whose chosen completion the verifier finds right, over all choices of n.",
    ]
    return "\n".join(lines) + "\n"


SHOWS = {"best_0": "best of n by the first reward", "n": "n"}
STAGE = Stage("best_of_n", 1, {"best-of-n": "section"}, BestOfNConfig, run, SHOWS, packages=("numpy",))
