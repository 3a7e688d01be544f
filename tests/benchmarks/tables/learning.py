"""Tables of what the shipped recipes learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.benchmarks.results import Figure, Line, Run
from tests.benchmarks.tables.markdown import NONE, lines, number, span, table

POLICIES = {"sft": "SFT", "round-1": "round 1", "round-2": "round 2"}
COLUMNS = {
    "accuracy": "verifier accuracy",
    "reward": "mean reward",
    "win_rate": "win rate against SFT",
    "kl": "KL from SFT (nats)",
}
VARIANTS = {
    "ahead by 1, partial rollouts": "GRPO, `max_staleness: 1`, partial rollouts",
    "ahead by 2, partial rollouts": "GRPO, `max_staleness: 2`, partial rollouts",
    "ahead by 1, whole rollouts": "GRPO, `max_staleness: 1`, no partial rollouts",
    "disaggregated": "GRPO, `placement: disaggregated`",
    "two turns": "two turns (`agent.yaml`), mean reward of the first → last 3 steps",
    "two turns, ahead by 1": "two turns, `max_staleness: 1`, learning rate 5e-4",
}
"""How the page calls variants whose name alone is unclear."""


def quickstart_by_seed(runs: Sequence[Run]) -> str:
    rows = []
    for line in lines(runs):
        for name, policy in line["policies"].items():
            first = name == "sft"
            cells = [_interval(policy, metric, 2 if metric == "reward" else 3) for metric in COLUMNS]
            judge = number(line["reward_model_accuracy"], 3) if first else ""
            rows.append([str(line["seed"]) if first else "", POLICIES[name], *cells, judge])
    head = ("seed", "policy", *COLUMNS.values(), "the reward model's held-out accuracy")
    return table(head, rows)


def reinforcement(runs: Sequence[Run]) -> str:
    rows = []
    for line in lines(runs):
        before, after = line["policies"]["sft"], line["policies"]["rl"]
        accuracy = " → ".join(_interval(policy, "accuracy", 3) for policy in (before, after))
        rows.append([f"`{line['recipe']}.yaml`", accuracy, _interval(after, "win_rate", 3), number(after["kl"], 2)])
    return table(("recipe", "verifier accuracy: SFT → after 30 steps", "win rate against SFT", "KL (nats)"), rows)


def _interval(policy: Mapping[str, float], metric: str, decimals: int) -> str:
    if metric not in policy:
        return NONE
    mean, low, high = (number(policy.get(f"{metric}{end}"), decimals) for end in ("", ".low", ".high"))
    return mean if low == NONE else f"{mean} [{low}, {high}]"


def estimators(runs: Sequence[Run]) -> str:
    """A row for each variant, a column for each seed; failed runs have a dash."""
    results = lines(runs)
    seeds = sorted({line["seed"] for line in results if "seed" in line})
    names = dict.fromkeys(line["run"] for line in results)

    def cell(name: str, seed: int) -> str:
        same = [line for line in results if (line["run"], line.get("seed")) == (name, seed) and "after" in line]
        return _change(same[0]) if same else NONE

    rows = [
        [
            VARIANTS.get(name, name),
            *(cell(name, seed) for seed in seeds),
            span((line.get("seconds") for line in results if line["run"] == name), 0),
        ]
        for name in names
    ]
    return table(("run", *(f"seed {seed}" for seed in seeds), "seconds"), rows)


def _change(line: Line) -> str:
    return f"{line['before'][0]:.3f} → {line['after'][0]:.3f}"


FIGURES = (
    Figure(
        "quickstart-by-seed",
        "what the quickstart learns",
        ("python -m tests.benchmarks recipes quickstart --seeds 1 2 3",),
        10,
        quickstart_by_seed,
    ),
    Figure("rl", "what GRPO and PPO learn", ("python -m tests.benchmarks recipes grpo rlhf",), 5, reinforcement),
    Figure(
        "estimators",
        "what every estimator and schedule learns",
        tuple(f"python -m tests.learning --seeds {seed}" for seed in (1, 2, 3)),
        60,
        estimators,
        exit_codes=(0, 1),
    ),
)
