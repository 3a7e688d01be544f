"""GRPO from end to end: `align run` of a small recipe, with Ray, vLLM and DeepSpeed, on the device that the recipe names."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.report import CannotRun
from tests.gpu.size import the_device

NEEDED = ("ray", "vllm", "deepspeed", "prefect")
MOST = 0.05
"""Greatest mean difference of the engine's log-probabilities from the trainer's, in nats, in bf16."""
SHOWN = ("steps", "reward.first", "reward", "mismatch", "grad_norm", "changed_weights", "startup_seconds", "seconds")
ROOT = Path(__file__).parents[2]
REWARD = """
def small(completions):
    return [sum(character < "h" for character in each["completion"]) / 8 for each in completions]
"""
"""Varies between the completions of a new model, which solves no task."""
SHAPE = {"architecture": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def recipe(kind: str) -> dict[str, Any]:
    """Two steps on a CPU, ten on a GPU; in bf16 as on any GPU."""
    on_gpu = kind == "cuda"
    return {
        "method": "rl",
        "name": "gpu-check",
        "model": {"scratch": {**SHAPE, "num_hidden_layers": 3}},
        "rl": {
            "prompts": {"task": "first", "rows": 64},
            "steps": 10 if on_gpu else 2,
            "prompts_per_step": 16 if on_gpu else 4,
            "generation": {"num_generations": 4, "max_completion_length": 8},
            "rewards": [{"function": "reward.py:small"}],
            "training": {"batch_size": 64 if on_gpu else 16, "learning_rate": 1e-3, "bf16": True},
        },
        "resources": {"device": kind, "trainers": 1, "engines": 1, "wait_timeout_seconds": 300},
    }


def run(kind: str) -> dict[str, Any]:
    """The run's cost, and the last metrics of its training."""
    the_device(kind)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise CannotRun(f"not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="g", dir="/tmp") as folder:  # a short path, for Ray's sockets
        path = Path(folder, "recipe.json")
        path.write_text(json.dumps(recipe(kind)))
        Path(folder, "reward.py").write_text(REWARD)
        done = subprocess.run(
            [sys.executable, "-m", "alignment.flows.cli.main", "run", str(path), "--json"],
            env={**os.environ, "ALIGN_HOME": f"{folder}/home", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stderr.strip() or done.stdout.strip())[-2000:]
        outcome = json.loads(done.stdout.strip().splitlines()[-1])
    figures = {**outcome["cost"], **outcome["metrics"]}
    assert outcome["status"] == "completed", outcome
    assert figures["grad_norm"] > 0, "nothing was trained"
    assert figures["changed_weights"] > 0, "the weights are those of the start"
    assert figures["mismatch"] < MOST, f"engine and trainer differ by {figures['mismatch']:.3g} nats"
    return {name: figures[name] for name in SHOWN}
