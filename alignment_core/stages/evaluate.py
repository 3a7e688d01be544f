"""Stage: scored completions of a policy → metrics with intervals, beside a baseline's on the same prompts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from alignment_core.evaluation.files import LM_EVAL, VERDICTS
from alignment_core.evaluation.metric_names import titles
from alignment_core.evaluation.statistics import bootstrap, pass_at, per_prompt, wilson, win_rate_per_prompt
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.rollout.schemas import read_rollouts, read_scores

MEANS = {"accuracy": "verifier", "reward": "reward"}
"""Metrics that are the mean of a column of scores, if it has any number."""
UNBOUNDED = ("reward", "kl", "kl_to_model", "length")
"""Metrics without bounds; the others are in [0, 1]."""


class EvaluateConfig(StageConfig):
    """The statistics. Inputs are the ``scores`` of a policy and, if there is one, ``baseline_scores``, the completions of both
    (``rollouts``, ``baseline_rollouts``), and what else was measured, see :func:`alignment_core.composition.steps.evaluate`."""

    win_margin: float = 0.0
    confidence: float = 0.95
    resamples: int = 2000
    pass_at: tuple[int, ...] = ()
    samples_all_tokens: bool = False
    """Whether completions are samples of the unmodified policy, so that their log-probabilities are those of the policy."""


def run(context: StageContext, config: EvaluateConfig) -> dict[str, Any]:
    first = _first_of_equal_prompts(context)

    def read(role: str, rollouts: str = "") -> list[dict[str, Any]]:
        scores = read_scores(context.inputs[role])
        rows = [{**row, "prompt": first.get(row["prompt"], row["prompt"])} for row in scores]
        if rollouts not in context.inputs:
            return rows
        completions = read_rollouts(context.inputs[rollouts])  # in the order of their scores
        answers = [completion["completion_ids"].tobytes() for completion in completions]
        return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]

    rows = read("scores", "rollouts")
    baseline = read("baseline_scores", "baseline_rollouts") if "baseline_scores" in context.inputs else None
    metrics: dict[str, Any] = {
        "confidence": config.confidence,
        "truncated": float(np.mean([row["finish_reason"] == "length" for row in rows])),
    }
    measured = {name: column for name, column in MEANS.items() if any(row[column] is not None for row in rows)}
    if failed := sum(any(row[column] is None for column in measured.values()) for row in rows):
        metrics["failed_rewards"] = failed
        metrics["completions"] = len(rows)
    sources = list(zip(*[row["rewards"] for row in rows if row.get("rewards")], strict=True))
    for number, given in enumerate(sources if len(sources) > 1 else ()):
        if numbers := [reward for reward in given if reward is not None]:
            metrics[f"reward_{number}"] = float(np.mean(numbers))
    per_prompt_values = {name: per_prompt(rows, column) for name, column in (measured | {"length": "tokens"}).items()}
    for k in config.pass_at:
        if len(passed := pass_at(rows, "verifier", k)):
            per_prompt_values[f"pass@{k}"] = passed
    if rows[0]["reference_logp"] is not None:
        per_prompt_values["kl"] = _kl(rows)
        metrics["baseline_perplexity"] = _perplexity(rows, "reference_logp")
    elif baseline is None and config.samples_all_tokens:
        metrics["baseline_perplexity"] = _perplexity(rows, "policy_logp")
    if "scores_to_origin" in context.inputs:
        per_prompt_values["kl_to_model"] = _kl(read("scores_to_origin"))
    column = "reward" if "reward" in per_prompt_values else "verifier"
    if baseline is not None and {"accuracy", "reward"} & per_prompt_values.keys():
        per_prompt_values["win_rate"] = win_rate_per_prompt(rows, baseline, column, config.win_margin)
    if "verdicts" in context.inputs:
        verdicts = json.loads((context.inputs["verdicts"] / VERDICTS).read_text())
        judged = [
            {"prompt": first.get(int(number), int(number)), "won": won} for number, won in verdicts["prompts"].items()
        ]
        per_prompt_values["judged_win_rate"] = per_prompt(judged, "won")
        if "position_changed" in verdicts:
            metrics["position_changed"] = verdicts["position_changed"]
        if unjudged := verdicts["failed"]:
            metrics["unjudged_pairs"] = unjudged
            metrics["pairs"] = unjudged + verdicts["pairs"]
    if "lm_eval" in context.inputs:
        metrics |= json.loads((context.inputs["lm_eval"] / LM_EVAL).read_text())["metrics"]
    for name, values in per_prompt_values.items():
        if name in UNBOUNDED:
            interval = bootstrap(values, config.confidence, config.resamples, context.derive("bootstrap", name))
        else:
            interval = wilson(values, config.confidence)
        metrics |= {name: interval.mean, f"{name}.n": len(values)}
        metrics |= {f"{name}.low": interval.low, f"{name}.high": interval.high}
    content = {name: float(f"{value:.9g}") for name, value in metrics.items()}
    (context.output / "metrics.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return metrics


def _first_of_equal_prompts(context: StageContext) -> dict[int, int]:
    """For each prompt the number of the first equal one: answers to a prompt that is in the data several times, as in pairs
    that share it, are not independent. Empty without the input ``prompts``."""
    if "prompts" not in context.inputs:
        return {}
    import pyarrow.parquet as pq

    table = pq.read_table(context.inputs["prompts"] / "train.parquet", columns=["prompt_ids"])
    first: dict[tuple[int, ...], int] = {}
    ids = map(tuple, table.column("prompt_ids").to_pylist())
    return {number: first.setdefault(prompt, number) for number, prompt in enumerate(ids)}


def _kl(rows: list[dict[str, Any]]) -> np.ndarray:
    """Per prompt, the KL to the reference of the scores: k1 of Schulman's "Approximating KL divergence". Unbiased, in nats per
    completion, because both log-probabilities are of the distributions at the sampling temperature (see
    ScoreConfig.temperature)."""
    return per_prompt([{**row, "gap": row["policy_logp"] - row["reference_logp"]} for row in rows], "gap")


def _perplexity(rows: list[dict[str, Any]], logp: str) -> float:
    """Of all completions, per token, at the sampling temperature."""
    return float(np.exp(-sum(row[logp] for row in rows) / sum(row["tokens"] for row in rows)))


SHOWS = titles("accuracy", "reward", "win_rate", "judged_win_rate", "kl")
STAGE = Stage("evaluate", 1, {"evaluation": "evaluation"}, EvaluateConfig, run, SHOWS, packages=("numpy",))
