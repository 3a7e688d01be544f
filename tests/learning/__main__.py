"""``python -m tests.learning``: every advantage estimator and every way to share the time raises the score, seed by seed.

Each run starts from the quickstart's SFT model of its seed, learns on the built-in tasks and is judged on held-out
prompts; the two-turn environment is judged by the completions of its first and last steps. One JSON object a line; the exit
code is 1 where a gain is below the margin or a run takes too long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from alignment.flows.cli.run import NOT_PROMOTED
from alignment_core.artifacts import Reference, open_store
from alignment_core.evaluation.statistics import wilson

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deployments" / "recipes"
MARGIN, MOST_SECONDS = 0.2, 180.0
STEPS_SHOWN = 3
"""First and last steps that the two-turn environment is judged by."""

OFF_POLICY = "rl.importance_sampling_correction={mode: clip, stop_above: 1}"
"""In one of these recipes' large steps a policy moves further than the usual bound."""
PLAIN = ["rl.advantage.scale_rewards=none"]
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "GAE with a critic (PPO)": (
        "grpo",
        [
            "rl.advantage={estimator: gae, whiten: mean-and-deviation}",
            "rl.critic={learning_rate: 1.0e-3, freezing_steps: 2}",
            "rl.loss={aggregation: token-mean}",
        ],
    ),
    "REINFORCE++": ("grpo", ["rl.advantage={estimator: returns, whiten: mean-and-deviation}"]),
    "REINFORCE++-baseline": ("reinforce-baseline", []),
    "RLOO": ("grpo", ["rl.advantage={estimator: leave-one-out}"]),
    "GRPO": ("grpo", []),
    "Dr. GRPO": ("grpo", [*PLAIN, "rl.loss={aggregation: fixed-length}"]),
    "batch mean (FlashREINFORCE)": (
        "grpo",
        [
            "rl.advantage={estimator: batch, whiten: mean-and-deviation}",
            "rl.generation.num_generations=1",
            "rl.prompts_per_step=512",
        ],
    ),
    "disaggregated": ("grpo", ["resources.placement=disaggregated"]),
    "ahead by 1, partial rollouts": ("grpo", ["rl.execution={max_staleness: 1}", OFF_POLICY]),
    "ahead by 2, partial rollouts": ("grpo", ["rl.execution={max_staleness: 2}", OFF_POLICY]),
    "ahead by 1, whole rollouts": ("grpo", ["rl.execution={max_staleness: 1, partial_rollouts: false}", OFF_POLICY]),
    "two turns": ("agent", []),
    "two turns, ahead by 1": (
        "agent",
        [
            "rl.execution={max_staleness: 1}",
            OFF_POLICY,
            "rl.training.learning_rate=5.0e-4",  # its first rewards are few: two steps on the same ones must not be too far
        ],
    ),
}


def align(home: Path, recipe: str, overrides: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(RECIPES / f"{recipe}.yaml"), "--json"]
    command += [argument for override in overrides for argument in ("--set", override)]
    environment = {**os.environ, "ALIGN_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != NOT_PROMOTED:  # whether it learns enough is judged here
        done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def scores(outcome: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(mean, low, high) before and after."""
    policies = outcome["metrics"].get("policies")
    if policies:
        ends = ("", ".low", ".high")
        before, after = ([policies[name][f"accuracy{end}"] for end in ends] for name in ("sft", "rl"))
        return before, after
    (run,) = [stage for stage in outcome["stages"] if stage["label"] == "rl"]
    trajectories = open_store(outcome["store"]).fetch(Reference.parse(run["outputs"]["trajectories"]))
    files = sorted(trajectories.iterdir())
    return _interval(files[:STEPS_SHOWN]), _interval(files[-STEPS_SHOWN:])


def _interval(files: list[Path]) -> list[float]:
    """Over prompts, as the evaluations' are."""
    rows = [row for file in files for row in pq.read_table(file, columns=["group", "rewards"]).to_pylist()]
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["rewards"][0])
    interval = wilson(np.array([np.mean(group) for group in groups.values()]), confidence=0.95)
    return [interval.mean, interval.low, interval.high]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--home", type=Path, help="an ALIGN_HOME to go on in; none makes a new one")
    arguments = parser.parse_args()
    home = arguments.home or Path(tempfile.mkdtemp(prefix="learning-"))
    bad = 0
    for seed in arguments.seeds:
        align(home, "grpo", [f"seed={seed}", "rl.steps=1", "evaluation=null", "promotion=null"])  # the SFT model
        for name in arguments.only:
            recipe, overrides = VARIANTS[name]
            began = time.monotonic()
            try:
                outcome = align(home, recipe, [f"seed={seed}", *overrides])
            except subprocess.CalledProcessError as error:  # which printed the reason
                bad += 1
                print(json.dumps({"run": name, "seed": seed, "exit_code": error.returncode}), flush=True)
                continue
            seconds = time.monotonic() - began
            before, after = scores(outcome)
            good = after[0] >= before[0] + MARGIN and after[1] > before[2] and seconds <= MOST_SECONDS
            bad += not good
            shown = {"before": [round(value, 3) for value in before], "after": [round(value, 3) for value in after]}
            line = {"run": name, "seed": seed, **shown, "seconds": round(seconds, 1), "good": good}
            print(json.dumps(line, ensure_ascii=False), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
