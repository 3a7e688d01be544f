"""TRL's trainers beside ours: the same weights, rows and threads, in turn, in one run.

TRL runs with several of its settings; the ratio is to the fastest. The sides are in ``our_side`` and ``trl_side``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.recipes import ScratchModel
from tests.benchmarks.laps import LAPS, THREADS, Runner, Taken, compare
from tests.benchmarks.our_side import our_rl, our_trainer
from tests.benchmarks.peer_rows import (
    COMPLETION,
    COMPLETIONS,
    HH,
    PROMPT,
    PROMPTS,
    demonstrations,
    hh_pairs,
    made_up_pairs,
    make_endless,
    prompts,
)
from tests.benchmarks.trl_side import trl_dpo, trl_grpo, trl_sft

LARGE = ScratchModel(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8)
SMALL = ScratchModel(
    hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, tie_word_embeddings=False
)
MISSING = "TRL is not installed here: install the extra `test`, as `make test` does"


def ratios(laps: Mapping[str, Taken], part: str = "all") -> dict[str, Any]:
    """Seconds of all, and how many times as long TRL's fastest takes: the median, and the least and most of the laps.

    ``cpu_ratio`` is the same for CPU seconds, which vary less while others use the machine.
    """
    times = {name: np.array([lap[part] for lap in side.laps]) for name, side in laps.items()}
    ours = times.pop("ours")
    best = min(times, key=lambda name: float(np.median(times[name][:, 1])))
    by_lap = times[best] / ours
    figures: dict[str, Any] = {"ratio": 0.0, "spread": [], "cpu_ratio": 0.0, "cpu_spread": []}
    for values, name in zip(by_lap.T, ("", "cpu_"), strict=True):
        figures[f"{name}ratio"] = round(float(np.median(values)), 2)
        figures[f"{name}spread"] = [round(float(values.min()), 2), round(float(values.max()), 2)]
    medians = {name: np.median(values, axis=0).round(2).tolist() for name, values in times.items()}
    return {
        **figures,
        "seconds": np.median(ours, axis=0).round(2).tolist(),
        "trl_seconds": medians,
        "trl_fastest": best,
    }


def sft(folder: Path) -> Iterator[dict[str, Any]]:
    model, rows = folder / "sft", demonstrations()
    parameters = create(LARGE, model)
    laps = compare(model, rows, [Runner("ours", our_trainer, {}), *SFT])
    tokens = sum(len(row["input_ids"]) for row in rows)
    settings = {"method": "sft", "parameters": parameters, "rows": len(rows), "tokens": tokens}
    yield {**settings, **ratios(laps), **settings_of(SFT)}


def dpo(folder: Path) -> Iterator[dict[str, Any]]:
    model = folder / "dpo"
    parameters = create(LARGE, model)
    pairs = {"made-up": made_up_pairs()}
    if HH.is_file():
        pairs["HH-RLHF"] = hh_pairs()
    else:
        print("dpo: made-up pairs alone, because ../shared/data (HH-RLHF) is not here", file=sys.stderr)
    for name, rows in pairs.items():
        laps = compare(model, rows, [Runner("ours", our_trainer, {}), *DPO])
        tokens = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
        settings = {"method": "dpo", "pairs": name, "parameters": parameters, "rows": len(rows), "tokens": tokens}
        yield {**settings, **ratios(laps), **settings_of(DPO)}


def grpo(folder: Path) -> Iterator[dict[str, Any]]:
    model, rows = folder / "grpo", prompts()
    parameters = create(SMALL, model)
    make_endless(model)
    laps = compare(model, rows, [Runner("ours", our_rl, {**SIZE, "steps": LAPS + 1}), *GRPO])
    completions = PROMPTS * COMPLETIONS
    settings = {
        "method": "grpo",
        "parameters": parameters,
        "rows": completions,
        "tokens": completions * (PROMPT + COMPLETION),
    }
    yield {**settings, **ratios(laps), "training": ratios(laps, "training"), **settings_of(GRPO)}


def settings_of(runners: Sequence[Runner]) -> dict[str, Any]:
    return {"trl_settings": {runner.name: dict(runner.settings) for runner in runners}}


def create(shape: ScratchModel, model: Path) -> int:
    from alignment_core.models.scratch import create_model

    return create_model(shape, None, 0, model)


SFT = [
    Runner("padded, 16", trl_sft, {"micro_batch": 16}),
    Runner("by length, 4", trl_sft, {"micro_batch": 4, "train_sampling_strategy": "group_by_length"}),
    Runner("packed", trl_sft, {"micro_batch": 1, "batch": 4, "packing": True}),
]
DPO = [
    Runner("4", trl_dpo, {"micro_batch": 4}),
    Runner("1, reference precomputed", trl_dpo, {"micro_batch": 1, "precompute": True}),
]
SIZE = {"completions": COMPLETIONS, "length": COMPLETION}
GRPO = [Runner("16", trl_grpo, {"micro_batch": 16, **SIZE})]


def main() -> None:
    if find_spec("trl") is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        os.environ["TMPDIR"] = folder  # of the sides
        for method in (sft, dpo, grpo):
            for figures in method(Path(folder)):
                print(json.dumps({**figures, "threads": THREADS}), flush=True)


if __name__ == "__main__":
    main()
