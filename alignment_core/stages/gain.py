"""Stage: selection and gain of each round so far → whether to train another round, and the best policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from alignment_core.execution.base import Stage, StageConfig, StageContext

SECTION = "section.md"
"""File of artifacts of the kind ``section``, which reports of runs show."""


class GainConfig(StageConfig):
    """What to compare. Inputs are the training data of the rounds, ``kept-1`` and so on, and with ``metric`` the
    evaluations of the policies, ``policy-0`` and so on."""

    policies: tuple[str, ...]
    """Labels of the policies: the one before the first round, and that of each trained round."""
    kept: int
    """Number of rounds that have selected their rows."""
    rounds: int
    """Number of rounds at most."""
    metric: str | None = None
    """Metric of the evaluations; None: the mean score of the policy's samples for the next round."""
    min_gain: float | None = None
    """Minimum gain of a round; None: all rounds run."""


def run(context: StageContext, config: GainConfig) -> dict[str, Any]:
    rounds = [_selection(context, number) for number in range(1, config.kept + 1)]
    if config.metric is None:
        measured = [selection["score"] for selection in rounds]
    else:
        measured = [_evaluated(context, number, config.metric) for number in range(len(config.policies))]
    gains = [round(after - before, 9) for before, after in pairwise(measured)]
    stops = _why_it_stops(config, rounds, gains)
    best = max(range(len(measured)), key=lambda number: (measured[number], -number)) if stops else None
    result = config.policies[-1 if best is None else best]
    name = config.metric or "mean score"
    content = {"measure": name, "values": measured, "gains": gains, "rounds": rounds, "stops": stops, "result": result}
    (context.output / "gain.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (context.output / SECTION).write_text(_markdown(config, name, rounds, measured, gains, stops, result))
    metrics: dict[str, Any] = {"kept": rounds[-1]["kept"], "result": result}
    if gains:
        metrics["gain"] = gains[-1]
    return {**metrics, **({"stops": stops} if stops else {})}


def _selection(context: StageContext, number: int) -> dict[str, Any]:
    content = json.loads((context.inputs[f"kept-{number}"] / "statistics.json").read_text())
    return dict(content["selection"])


def _evaluated(context: StageContext, number: int, metric: str) -> float:
    return float(json.loads((context.inputs[f"policy-{number}"] / "metrics.json").read_text())[metric])


def _why_it_stops(config: GainConfig, rounds: Sequence[dict[str, Any]], gains: Sequence[float]) -> str | None:
    """A sentence, or None if the next round should run."""
    if config.min_gain is None:
        return None
    if not rounds[-1]["new"]:
        return f"none of the {rounds[-1]['completions']} completions of round {len(rounds)} is left to train on"
    if not gains or (gains[-1] >= config.min_gain and gains[-1] > 0):
        return None
    name, number = config.metric or "mean score", len(gains)
    if gains[-1] <= 0:
        return f"round {number} brought no gain: {name} {gains[-1]:+.4g}"
    return f"round {number} brought less than min_gain: {name} {gains[-1]:+.4g} of {config.min_gain:g}"


def _markdown(
    config: GainConfig,
    name: str,
    rounds: Sequence[dict[str, Any]],
    measured: Sequence[float],
    gains: Sequence[float],
    stops: str | None,
    result: str,
) -> str:
    head = ("round", "completions", "kept", "share kept", "of prompts", "duplicates", "score", "of kept", name, "gain")
    lines = ["## Rounds", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for number, selection in enumerate(rounds):
        cells = [
            str(number + 1),
            f"{selection['completions']}",
            f"{selection['new']}",
            f"{selection['kept']:.3f}",
            f"{selection['prompts_kept']} of {selection['prompts']}",
            f"{selection.get('dropped_duplicate', 0)}",
            f"{selection['score']:.4g}",
            f"{selection['score_kept']:.4g}" if "score_kept" in selection else "—",
            f"{measured[number]:.4g} → {measured[number + 1]:.4g}" if number < len(gains) else "—",
            f"{gains[number]:+.4g}" if number < len(gains) else "—",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    where = "on the held-out prompts" if config.metric else "of what the policies before and after the round sampled"
    lines += ["", f"`{name}` is measured {where}. Duplicates were dropped."]
    if stops:
        lines += ["", f"**Training ended after {len(config.policies) - 1} of {config.rounds} rounds: {stops}.**"]
    lines += ["", f"The best policy so far is `{result}`." if stops else f"The policy so far is `{result}`."]
    return "\n".join(lines) + "\n"


SHOWS = {"gain": "gain", "kept": "share kept", "result": "result", "stops": "stops:"}
STAGE = Stage("gain", 1, {"gain": "section"}, GainConfig, run, SHOWS)
