"""The quickstart as a whole: time to the first step, the overhead of a round beside sampling and training, caching."""

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

from alignment.flows.cli.run import NOT_PROMOTED

LARGE_ROUND = ("evaluation=null", "promotion=null", "iterative_dpo.prompts_per_round=4800")
RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"


def run(home: str, *overrides: str) -> tuple[float, float, dict[str, Any]]:
    """Wall-clock start (Unix time), seconds, and the outcome of ``align run``."""
    began = time.time()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "alignment.flows.cli.main",
            "run",
            str(RECIPE),
            "--json",
            *(f"--set={override}" for override in overrides),
        ],
        env={**os.environ, "ALIGN_HOME": home},
        capture_output=True,
        text=True,
    )
    if done.returncode != NOT_PROMOTED:  # as slow as one that is promoted
        done.check_returncode()
    return began, time.time() - began, json.loads(done.stdout.strip().splitlines()[-1])


def records(home: str) -> dict[str, dict[str, Any]]:
    """The latest record of each label."""
    from alignment_core.artifacts import open_store

    stages = sorted(open_store(Path(home) / "store").records.all(), key=lambda record: record.finished_at)
    return {record.label: record.model_dump(mode="json") for record in stages}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def first_step(stages: dict[str, Any], began: float) -> float:
    """Seconds from the start of the command to the first optimiser step of SFT."""
    return moment(stages["sft"]["finished_at"]) - stages["sft"]["cost"]["train_seconds"] - began


def split_of_round(by_label: dict[str, dict[str, Any]], label: str) -> dict[str, float]:
    """Where the seconds of a round went, from the start of its first stage to the end of its last."""
    stages = {name: by_label[f"{label}/{name}"] for name in ("generate", "score", "select", "reference-logps", "dpo")}
    spent = moment(stages["dpo"]["finished_at"]) - moment(stages["generate"]["started_at"])
    sampling, scoring = stages["generate"]["cost"]["generate_seconds"], stages["score"]["cost"]["score_seconds"]
    training = stages["dpo"]["cost"]["train_seconds"] + stages["reference-logps"]["cost"]["score_seconds"]
    return {
        "seconds": round(spent, 1),
        "sampling": round(sampling / spent, 3),
        "scoring": round(scoring / spent, 3),
        "training": round(training / spent, 3),
        "rest": round(1 - (sampling + scoring + training) / spent, 3),
    }


def main() -> None:
    home = tempfile.mkdtemp(prefix="bench-")
    began, cold, outcome = run(home)
    stages = records(home)
    _, cached, again = run(home)
    assert {stage["state"] for stage in again["stages"]} == {"cached"}
    run(home, *LARGE_ROUND)
    large = split_of_round(records(home), "round-2")
    began_warm, warm, _ = run(home, "sft.training.batch_size=65")  # data and base model cached, everything in memory
    print(
        json.dumps(
            {
                "run_seconds": round(cold, 1),
                "first_training_step_seconds": round(first_step(stages, began), 1),
                "first_training_step_seconds_with_data_cached": round(first_step(records(home), began_warm), 1),
                "run_seconds_with_data_cached": round(warm, 1),
                "cached_run_seconds": round(cached, 1),
                "cached_seconds_per_stage": round(cached / len(again["stages"]), 3),
                "round": split_of_round(stages, "round-2"),
                "large_round_without_evaluation": large,
                "accuracy": {name: m["accuracy"] for name, m in outcome["metrics"]["policies"].items()},
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
