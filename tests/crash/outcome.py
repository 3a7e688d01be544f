"""The outcome of a run, and its differences from an undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from alignment_core.artifacts import Reference, open_store
from tests.crash.recipe import GENERATIONS, PROMPTS, STALENESS, STEPS

Digests = dict[str, str]
Comparison = Callable[[Path, Digests], list[str]]
"""The differences of the run in this home from the digests of the undisturbed run."""


def digests(home: Path) -> Digests:
    """Each output of each stage, by label and name, as the run itself printed it at its end."""
    last = (home / "output.txt").read_text().strip().splitlines()[-1]
    outcome: dict[str, Any] = json.loads(last)
    return {
        f"{stage['label']} {name}": output for stage in outcome["stages"] for name, output in stage["outputs"].items()
    }


def equal_digests(home: Path, expected: Digests) -> list[str]:
    """The outputs that are another artifact."""
    outputs = digests(home)
    labels = expected.keys() | outputs.keys()
    return [f"another {label}" for label in sorted(labels) if expected.get(label) != outputs.get(label)]


def each_prompt_once(home: Path, expected: Digests) -> list[str]:
    """Whether all before the rl stage gave the same artifacts, and its steps lost no prompt and took none twice."""
    outputs = digests(home)
    before = sorted(label for label in expected if not label.startswith("rl "))
    wrong = [f"another {label}" for label in before if outputs.get(label) != expected[label]]
    trajectories = open_store(home / "store").fetch(Reference.parse(outputs["rl trajectories"]))
    steps = [pq.read_table(file).to_pylist() for file in sorted(trajectories.iterdir())]
    return wrong + wrong_draws(steps)


def wrong_draws(steps: list[list[dict[str, Any]]]) -> list[str]:
    """Errors in the draws that these steps took and in the age of the weights that sampled them."""
    wrong = [] if len(steps) == STEPS else [f"{len(steps)} steps of {STEPS}"]
    taken = Counter((row["group"], row["sample"]) for rows in steps for row in rows)
    wrong += [f"completion {sample} of draw {draw} {n} times" for (draw, sample), n in taken.items() if n > 1]
    sizes = Counter(draw for draw, _ in taken)
    wrong += [f"draw {draw} with {size} completions" for draw, size in sizes.items() if size != GENERATIONS]
    missing = max(sizes) + 1 - len(sizes)
    if missing > (1 + STALENESS) * PROMPTS:
        wrong.append(f"{missing} draws lost of {max(sizes) + 1}")
    for step, rows in enumerate(steps):
        stale = step - np.concatenate([np.asarray(row["versions"])[row["mask"]] for row in rows])
        if stale.min() < 0 or stale.max() > STALENESS:
            wrong.append(f"step {step} trains on completions that are {stale.min()} to {stale.max()} steps old")
    return wrong
