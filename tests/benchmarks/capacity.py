"""The model of the cost against runs: coefficients of a small model's run predict that of a larger one on the same machine.

    python -m tests.benchmarks capacity

Prints predicted by measured seconds for each stage of the larger model, and exits 1 if one is off by more than a quarter.
Coefficients are those of the cores' time, as with `--like`. `by_clock` compares with the seconds of the stage on the wall,
during which the run's other processes and those of the machine may have used its cores; the machine's load is printed, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.provenance import Provenance
from alignment_core.capacity.measured import CPU, coefficients_of, measured_by
from tests.learning.__main__ import align

SMALL = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
MOST = 0.25
"""The most that predicted seconds may differ from measured ones, as a fraction of these."""
SHORT = ("sft.training.max_steps=40", "reward_model.training.max_steps=40", "iterative_dpo.rounds=1")


def run(home: Path, shape: dict[str, int], seed: int) -> list[Provenance]:
    """The records of the stages of a short quickstart with a model of this shape."""
    before = {record.key for record in _records(home)}
    scratch = [f"model.scratch.{name}={value}" for name, value in shape.items()]
    align(home, "quickstart", [*scratch, *SHORT, f"seed={seed}"])
    return [record for record in _records(home) if record.key not in before]


def _records(home: Path) -> list[Provenance]:
    return list(open_store(str(home / "store")).records.all()) if (home / "store").is_dir() else []


def compare(home: Path, small: list[Provenance], large: list[Provenance]) -> bool:
    """Print what the small model's stages predict for those of the large one; whether all are within the bound."""
    predictions = list[float]()
    store = open_store(str(home / "store"))

    def shape_of(reference: Reference) -> dict[str, Any]:
        return dict(json.loads((store.fetch(reference) / "config.json").read_text()))

    known = coefficients_of(small, CPU, shape_of)
    for record in large:
        by_clock = dict(measured_by(record, CPU, shape_of, by_clock=True))
        for name, value in measured_by(record, CPU, shape_of):
            # Seconds at full rates cancel: predicted / measured = (full / known) / (full / value).
            ratios = {"predicted_by_measured": value, "by_clock": by_clock[name]}
            shown = {title: round(of_stage / getattr(known, name), 3) for title, of_stage in ratios.items()}
            print(json.dumps({"stage": record.label, "coefficient": name, **shown}))
            predictions.append(shown["predicted_by_measured"])
    print(json.dumps({"load_of_15_minutes": round(os.getloadavg()[2], 2), "cores": os.cpu_count()}))
    return bool(predictions) and all(abs(ratio - 1) <= MOST for ratio in predictions)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        home = Path(folder)
        return 0 if compare(home, run(home, SMALL, 1), run(home, LARGE, 2)) else 1


if __name__ == "__main__":
    sys.exit(main())
