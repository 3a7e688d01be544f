"""What shipped recipes learn: metrics of their policies on held-out prompts, for each recipe and seed.

    python -m tests.benchmarks recipes NAME … [--seeds N …]

All runs are in one new home: recipes with the same SFT model train it once.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from tests.learning.__main__ import align

METRICS = ("accuracy", "reward", "win_rate", "kl")
JUDGE = "reward model, held-out accuracy"


def learned(home: Path, name: str, seed: int) -> dict[str, Any]:
    """Means and intervals of the metrics of each policy."""
    began = time.monotonic()
    outcome = align(home, name, [f"seed={seed}", f"promotion.tag=policy/{name}-{seed}"])
    metrics = outcome["metrics"]
    kept = [f"{metric}{end}" for metric in METRICS for end in ("", ".low", ".high")]
    policies = {
        policy: {metric: round(values[metric], 4) for metric in kept if metric in values}
        for policy, values in metrics["policies"].items()
    }
    line = {"recipe": name, "seed": seed, "policies": policies, "seconds": round(time.monotonic() - began, 1)}
    return line | ({"reward_model_accuracy": round(metrics[JUDGE], 4)} if JUDGE in metrics else {})


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.benchmarks recipes")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a recipe in deployments/recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        for name in options.names:
            for seed in options.seeds:
                print(json.dumps(learned(Path(home), name, seed)), flush=True)


if __name__ == "__main__":
    main()
