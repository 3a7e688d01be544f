"""The display of metrics: label, unit, group, and whether a metric is drawn as a curve.

The console, reports and the Prefect UI show metrics by this list, in its order. The direction of a metric is in
:mod:`~alignment_core.evaluation.directions`. Names in stored files and trackers are independent of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alignment_core.evaluation.directions import higher_is_better

EVALUATION, REWARDS, TRAINING, POLICY, COMPLETIONS, WORK, OTHER = GROUPS = (
    "Evaluation",
    "Rewards",
    "Training",
    "Policy update",
    "Completions",
    "Work",
    "Other",
)


@dataclass(frozen=True)
class Metric:
    """The display of a metric."""

    label: str
    group: str
    unit: str = ""
    curve: bool = False
    """Whether reports draw it over the steps."""

    @property
    def title(self) -> str:
        """Label and unit, such as ``KL (nats)``."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


NATS, TOKENS, PER_TOKEN, SHARE = "nats", "tokens", "nats per token", "share"
METRICS: dict[str, Metric] = {
    # Evaluation of a policy or a reward model
    "accuracy": Metric("accuracy", EVALUATION, curve=True),
    "verifier": Metric("verifier score", EVALUATION),
    "mean_verifier": Metric("verifier score", EVALUATION),
    "win_rate": Metric("win rate", EVALUATION),
    "judged_win_rate": Metric("win rate by the judge", EVALUATION),
    "baseline_perplexity": Metric("perplexity under the baseline", EVALUATION),
    "position_changed": Metric("changed with the position", EVALUATION, SHARE),
    "held_out_reward": Metric("held-out reward", EVALUATION, curve=True),
    "best_held_out_reward": Metric("best held-out reward", EVALUATION),
    "best_step": Metric("best step", EVALUATION),
    # Rewards of sampled completions
    "reward": Metric("reward", REWARDS, curve=True),
    "mean_reward": Metric("reward", REWARDS),
    "reward_deviation": Metric("reward std", REWARDS, curve=True),
    "reward/missing_share": Metric("completions without a reward", REWARDS, SHARE, curve=True),
    "failed_rewards": Metric("failed rewards", REWARDS),
    "prompts_used": Metric("prompts used", REWARDS, SHARE),
    # Training on fixed data
    "loss": Metric("loss", TRAINING, curve=True),
    "perplexity": Metric("perplexity", TRAINING, curve=True),
    "margin": Metric("reward margin", TRAINING, curve=True),
    "reward_chosen": Metric("reward of chosen completions", TRAINING),
    "reward_rejected": Metric("reward of rejected completions", TRAINING),
    "reward_desirable": Metric("reward of desirable completions", TRAINING),
    "reward_undesirable": Metric("reward of undesirable completions", TRAINING),
    "baseline": Metric("KL baseline", TRAINING, NATS),
    "desirable": Metric("desirable rows", TRAINING, SHARE),
    "nll": Metric("negative log-likelihood", TRAINING, PER_TOKEN),
    "label": Metric("good steps", TRAINING, SHARE),
    "beta": Metric("beta", TRAINING),
    "changed_weights": Metric("changed weights", TRAINING, SHARE),
    "aux_loss": Metric("router load-balancing loss", TRAINING),
    # Updates of a policy by reinforcement learning, and divergences
    "kl": Metric("KL", POLICY, NATS, curve=True),
    "kl_to_model": Metric("KL to the initial model", POLICY, NATS),
    "kl_coefficient": Metric("KL coefficient", POLICY),
    "entropy": Metric("entropy", POLICY, PER_TOKEN, curve=True),
    "entropy_estimate": Metric("entropy estimate", POLICY, PER_TOKEN, curve=True),
    "clipped": Metric("clip fraction", POLICY, "share of tokens", curve=True),
    "ratio": Metric("importance ratio", POLICY),
    "mismatch": Metric("KL of sampler and trainer", POLICY, PER_TOKEN),
    "staleness": Metric("staleness", POLICY, "steps"),
    "critic_loss": Metric("critic loss", POLICY, curve=True),
    "critic_error": Metric("critic absolute error", POLICY),
    "grad_norm": Metric("gradient norm", POLICY),
    "learning_rate": Metric("learning rate", POLICY),
    # Completions
    "completion_length": Metric("completion length", COMPLETIONS, TOKENS, curve=True),
    "length": Metric("completion length", COMPLETIONS, TOKENS),
    "truncated": Metric("truncated completions", COMPLETIONS, SHARE, curve=True),
    "completions": Metric("completions", COMPLETIONS),
    # Work
    "steps": Metric("steps", WORK),
    "rows": Metric("rows", WORK),
    "parameters": Metric("parameters of the model", WORK),
    "tokens_per_second": Metric("speed", WORK, "tokens/s"),
}
"""In the order in which they are shown."""
OF_POLICIES = (
    ("accuracy", "verifier accuracy"),
    ("reward", "mean reward"),
    ("win_rate", "win rate"),
    ("judged_win_rate", "win rate by the judge"),
    ("kl", "KL (nats)"),
    ("kl_to_model", "KL to `model` (nats)"),
    ("baseline_perplexity", "perplexity under the baseline"),
    ("length", "mean tokens"),
)
"""Columns of the table that compares policies, with titles that are more precise than the labels."""
_PATTERNS: tuple[tuple[str, str, Metric], ...] = (
    (r"rewards/(.+)/mean", "reward", Metric("reward: {}", REWARDS, curve=True)),
    (r"rewards/(.+)/std", "reward", Metric("reward std: {}", REWARDS, curve=True)),
    (r"reward_(\d+)", "reward", Metric("reward {}", REWARDS)),
    (r"changed_weights/(.+)", "changed_weights", Metric("changed weights: {}", TRAINING, SHARE)),
    (r"extra_(.+)", "prompts_used", Metric("{} (logged by a reward)", REWARDS)),
    (r"pass@(\d+)", "accuracy", Metric("pass@{}", EVALUATION)),
    (r"best_(\d+)", "accuracy", Metric("best of n by reward {}", EVALUATION)),
    (r"lm_eval/(.+)", "judged_win_rate", Metric("{}", EVALUATION)),
)
"""Names with a variable part: the metric that they follow in the order, and how they are shown."""
_PARTS = re.compile(r"\.(low|high|n|stderr|higher_is_better|first)$")


def metric_of(name: str) -> Metric:
    """The display of a metric by its name."""
    return _placed(name)[1]


def titles(*names: str) -> dict[str, str]:
    """Labels by name, for the key metrics of a stage."""
    return {name: metric_of(name).label for name in names}


def in_order(names: Iterable[str]) -> list[str]:
    """Names of metrics by group and place; unknown ones last."""
    return sorted(dict.fromkeys(names), key=lambda name: (_placed(name)[0], _natural(name)))


def is_curve(name: str) -> bool:
    """Whether reports draw the metric over the steps."""
    return metric_of(name).curve


def single_numbers(metrics: Mapping[str, Any]) -> list[str]:
    """The names of metrics that are numbers, in order, without parts of others, such as ends of intervals."""
    numbers = [
        name for name, value in metrics.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    return in_order(name for name in numbers if not _PARTS.search(name) and name != "confidence")


def arrow(name: str, metrics: Mapping[str, Any]) -> str:
    """``↑`` if a higher value of the metric is better, ``↓`` if a lower one is; empty if neither is."""
    bare = re.sub("^(test|critic)_", "", name)
    if (
        metric_of(name).group in (WORK, COMPLETIONS, OTHER)
        or bare in _NEUTRAL
        or re.search("/std$|^extra_|^changed_weights/", name)
    ):
        return ""
    return "↑" if higher_is_better(name, metrics) else "↓"


_NEUTRAL = frozenset(
    (
        *("best_step", "reward_deviation", "prompts_used", "baseline", "desirable", "label", "beta"),
        *("kl_coefficient", "entropy", "entropy_estimate", "clipped", "ratio", "staleness", "mismatch"),
        *("grad_norm", "learning_rate", "reward/missing_share", "changed_weights"),
    )
)
"""Metrics without a direction."""


def _placed(name: str) -> tuple[tuple[int, float], Metric]:
    """Place in the order, and how it is shown."""
    base = _PARTS.sub("", name)
    if base in METRICS:
        metric = METRICS[base]
        return (GROUPS.index(metric.group), _PLACES[base]), metric
    for pattern, follows, metric in _PATTERNS:
        if match := re.fullmatch(pattern, base):
            beside = (GROUPS.index(metric.group), _PLACES[follows] + 0.5)
            return beside, replace(metric, label=metric.label.format(match.group(1)))
    for prefix in ("test_", "critic_", "pretraining_"):
        if base.startswith(prefix) and (rest := base.removeprefix(prefix)) in METRICS:
            (group, place), metric = _placed(rest)
            return (group, place + 0.25), replace(metric, label=f"{prefix.removesuffix('_')} {metric.label}")
    return (GROUPS.index(OTHER), 0.0), Metric(base.replace("_", " "), OTHER)


_PLACES = {name: place for place, name in enumerate(METRICS)}


def _natural(name: str) -> list[Any]:
    """Sorts numbers in names as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
