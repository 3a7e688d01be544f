"""The quickstart as a whole: time to the first step, what a round spends on neither sampling nor training, caching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"


def run(home: str, *overrides: str) -> tuple[float, float, dict[str, Any]]:
    """Wall-clock start (Unix time), seconds, and the outcome of ``align run``."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(RECIPE), "--json", *(f"--set={one}" for one in overrides)],
        env={**os.environ, "ALIGN_HOME": home},
        capture_output=True,
        text=True,
        check=True,
    )
    return began, time.time() - began, json.loads(done.stdout.strip().splitlines()[-1])


def records(home: str) -> dict[str, dict[str, Any]]:
    from alignment_core.artifacts import open_store

    return {record.label: record.model_dump(mode="json") for record in open_store(Path(home) / "store").records()}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def first_step(made: dict[str, Any], began: float) -> float:
    """Seconds from the start of the command to the first optimiser step of SFT."""
    return moment(made["sft"]["finished_at"]) - made["sft"]["cost"]["train_seconds"] - began


def main() -> None:
    home = tempfile.mkdtemp(prefix="bench-")
    began, cold, outcome = run(home)
    made = records(home)
    _, cached, again = run(home)
    assert {stage["state"] for stage in again["stages"]} == {"cached"}
    round_labels = [f"round-2/{name}" for name in ("generate", "score", "select", "dpo")]
    spent = moment(made["round-2/dpo"]["finished_at"]) - moment(made["round-2/generate"]["started_at"])
    worked = sum(
        made[label]["cost"].get(name, 0.0) for label in round_labels for name in ("generate_seconds", "train_seconds")
    )
    print(
        json.dumps(
            {
                "run_seconds": round(cold, 1),
                "first_training_step_seconds_cold": round(first_step(made, began), 1),
                "cached_run_seconds": round(cached, 1),
                "cached_seconds_per_stage": round(cached / len(again["stages"]), 3),
                "round_seconds": round(spent, 1),
                "round_share_neither_sampling_nor_training": round(1 - worked / spent, 3),
                "accuracy": {name: m["accuracy"] for name, m in outcome["metrics"]["policies"].items()},
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
