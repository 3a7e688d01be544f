"""Seconds of a pretrained model before work begins: until a run's first step, of a second stage, and of `align serve`.

    python -m tests.benchmarks startup_real

Four rows of GSM8K (``REAL_DATA`` or ``../shared/data``) a run, one step a stage. The first run finds an empty home, the next
ones a warm one and rows that no run had. A stage is ready when its training loop begins. Other load adds to wall seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.peer_rows import GSM8K
from tests.processes import free_port
from tests.real_model import real_model

ALIGN = [sys.executable, "-m", "alignment.flows.cli.main"]
ROWS = 4
TIMES = 3
RECIPE = """
method: dpo
name: startup
model: {model}
sft: {{data: {{path: {folder}/demonstrations.jsonl}}, training: {{batch_size: 2, max_steps: 1, learning_rate: 1.0e-5}}}}
dpo: {{data: {{path: {folder}/pairs.jsonl}}, training: {{batch_size: 2, max_steps: 1, learning_rate: 1.0e-6}}}}
"""


def write_rows(folder: Path, number: int) -> None:
    """Rows of the run ``number``, which no other run has."""
    questions = [json.loads(line) for line in GSM8K.read_text().splitlines()[number * ROWS : (number + 1) * ROWS]]
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in questions]
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "No idea."} for row in questions]
    for name, content in {"demonstrations": rows, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def run(recipe: Path, environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the command to the first step of ``sft``, and from the start of ``dpo`` to its first step."""
    began = time.time()
    command = [*ALIGN, "run", str(recipe), "--json"]
    started: dict[str, float] = {}
    trained: dict[str, float] = {}
    folder = Path()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=sys.stderr, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "run_started":
                folder = Path(event["folder"])
            elif event.get("event") == "stage_started":
                started[event["stage"]] = time.time()
            elif event.get("event") == "stage_finished" and "train_seconds" in event["cost"]:
                trained[event["label"]] = event["cost"]["train_seconds"]
    assert process.returncode == 0, command
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ended = {step["stage"]: datetime.fromisoformat(step["at"]).timestamp() for step in steps if step["step"] == 1}
    first = {stage: ended[stage] - trained[stage] for stage in ("sft", "dpo")}
    return {"first step": first["sft"] - began, "second stage": first["dpo"] - started["dpo"]}


def serve(model: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds until a server answers, and the context that fits its cache."""
    port = free_port()
    began = time.monotonic()
    command = [*ALIGN, "serve", str(model), "--json", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGINT)
    return {"serve": seconds, "context": answer["context"]}


def measured() -> Iterator[dict[str, Any]]:
    model = real_model()
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        environment = {**os.environ, "ALIGN_HOME": home}
        recipe = Path(home) / "recipe.yaml"
        recipe.write_text(RECIPE.format(model=model, folder=home))
        for number in range(1 + TIMES):
            write_rows(Path(home), number)
            yield {"home": "warm" if number else "empty", **run(recipe, environment)}
        for _ in range(TIMES):
            yield serve(model, environment)


def main() -> None:
    for lap in measured():
        print(json.dumps({name: round(x, 1) if isinstance(x, float) else x for name, x in lap.items()}), flush=True)


if __name__ == "__main__":
    main()
