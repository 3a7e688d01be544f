"""Metrics of a policy from its scored completions, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Any

import numpy as np

from alignment_core.errors import DataError

RELATIVE = 64 * float(np.finfo(np.float32).eps)
"""Relative rounding of a reward in fp32: the reward of a completion in another batch is the same up to this."""
ABSOLUTE = 1e-6
"""Absolute rounding of a reward: in a sum whose terms cancel, the error is that of the terms."""


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float


def bootstrap(values_B: np.ndarray, confidence: float, resamples: int, seed: int) -> Interval:
    """Mean of per-prompt values with a percentile bootstrap interval (Efron 1979).

    Prompts are resampled, not completions: completions of one prompt are not independent.
    Args: ``values_B`` [B] one number per prompt.
    """
    values_B = np.asarray(values_B, np.float64)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for i in range(resamples):
        means[i] = values_B[rng.integers(0, len(values_B), len(values_B))].mean()
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values_B.mean()), float(low), float(high))


def wilson(values_B: np.ndarray, confidence: float) -> Interval:
    """Mean of per-prompt values in [0, 1] with a Wilson score interval (Wilson 1927).

    For values of 0 and 1 this is the interval of a proportion of P trials, which is valid for few prompts: 0 of 20 is
    [0, 0.161] at 95 %. Means of several completions, and win rates whose ties count one half, vary less; then the number of
    trials is the effective sample size p (1 - p) P / s² (Kish 1965), at least P. s² includes two pseudo-observations, 0 and 1,
    so that a few equal values do not give an interval of zero width.
    Args: ``values_B`` [B] one number per prompt.
    """
    values_B = np.asarray(values_B, np.float64)
    prompts, p = len(values_B), float(values_B.mean())
    variance = (np.square(values_B - p).sum() + p**2 + (1 - p) ** 2) / (prompts + 1)
    trials = max(prompts, p * (1 - p) * prompts / variance)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    shrunk = 1 + z**2 / trials
    middle = (p + z**2 / (2 * trials)) / shrunk
    half = z / shrunk * (p * (1 - p) / trials + z**2 / (4 * trials**2)) ** 0.5
    return Interval(p, float(min(p, max(0.0, middle - half))), float(max(p, min(1.0, middle + half))))


def per_prompt(rows: Sequence[dict[str, Any]], column: str) -> np.ndarray:
    """Mean of ``column`` for each prompt [B], in the order of prompt numbers. Rows without a value are skipped."""
    rows = [row for row in rows if row[column] is not None]
    prompts = np.array([row["prompt"] for row in rows])
    values = np.array([row[column] for row in rows], np.float64)
    _, number = np.unique(prompts, return_inverse=True)
    return np.bincount(number, values) / np.bincount(number)


def win_rate_per_prompt(
    rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]], column: str, margin: float
) -> np.ndarray:
    """Win rate of each prompt's completions over the baseline's, over all pairs [B].

    A difference of at most ``margin``, or within the rounding of the two values, is a tie and counts one half. Rows with the
    same ``answer``, if they have one, tie as well: a reward model in bf16 gives it another reward in another batch. Completions
    without a value are skipped, and so are prompts without completions on one side. Raises DataError for other prompts.
    """
    own = _by_prompt(rows, column)
    others = _by_prompt(baseline, column)
    check_same_prompts(own, others)
    both = [prompt for prompt in sorted(own) if own[prompt] and others[prompt]]
    return np.array([_wins(own[prompt], others[prompt], column, margin) for prompt in both])


def check_same_prompts(prompts: Collection[int], of_baseline: Collection[int]) -> None:
    """Raise DataError unless both policies answered the same prompts."""
    if set(prompts) != set(of_baseline):
        raise DataError(
            f"the two policies were sampled on different prompts, {len(prompts)} and {len(of_baseline)}: with the wanted "
            "values of conditional SFT some are longer than evaluation.prompts.max_prompt_length or max_length, so raise "
            "these until no prompt is left out"
        )


def pass_at(rows: Sequence[dict[str, Any]], column: str, k: int) -> np.ndarray:
    """Probability that at least one of ``k`` completions of a prompt is right, for each prompt [B].

    ``1 - C(n - c, k) / C(n, k)`` for n completions of which c are right (a score of 1): unbiased, Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code". Completions without a score are skipped, and so are prompts with fewer
    than k.
    """
    scored = [group for _, group in sorted(_by_prompt(rows, column).items()) if len(group) >= k]
    right = [sum(row[column] >= 1 for row in group) for group in scored]
    return np.array([1 - comb(len(group) - c, k) / comb(len(group), k) for group, c in zip(scored, right, strict=True)])


def _wins(own: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], column: str, margin: float) -> float:
    """Share of wins of the ``own`` rows of a prompt over the ``others``, over all pairs."""
    scores_N, baseline_M = (np.array([row[column] for row in rows], np.float64) for rows in (own, others))
    difference_NM = scores_N[:, None] - baseline_M[None, :]
    rounding_NM = np.maximum(ABSOLUTE, RELATIVE * np.maximum(np.abs(scores_N)[:, None], np.abs(baseline_M)[None, :]))
    answers = [row.get("answer") for row in others]
    same_NM = np.array([[answer is not None and answer == row.get("answer") for answer in answers] for row in own])
    ties_NM = same_NM | (np.abs(difference_NM) <= np.maximum(margin, rounding_NM))
    return float(np.where(ties_NM, 0.5, difference_NM > 0).mean())


def _by_prompt(rows: Sequence[dict[str, Any]], column: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of each prompt that have a value."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompt"], []).extend([row] if row[column] is not None else [])
    return groups
