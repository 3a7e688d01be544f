"""The work of the driver in a step of reinforcement learning: the stage itself, with engines and trainers that answer at once.

    python -m tests.benchmarks driver

For 1,024 prompts with 8 completions of 4,096 tokens each: seconds of the driver's processor by part, those of its threads
included, and their share of the seconds of a step as `align plan` counts them for a 7B model on 8 and on 64 H100. Exits 1 if
a share is above ``MOST``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.estimate import Cluster, estimate
from alignment_core.capacity.hardware import hardware_of
from alignment_core.cluster import group
from alignment_core.data import completion_text
from alignment_core.execution import warm_actors
from alignment_core.execution.machines import WarmMachines
from alignment_core.recipes import ResourcesConfig
from alignment_core.rollout import sampling, trajectories
from alignment_core.stages.rl import loop, rewards
from alignment_core.training import policy_groups
from tests.benchmarks import simulated
from tests.capacity.shapes import QWEN_2_5_7B, only_work, recipe_of
from tests.real_model import real_model
from tests.stages.rl_runs import run_rl

PROMPTS, GENERATIONS, TOKENS, PROMPT, STEPS = 1024, 8, 4096, 256, 2
GPUS = (8, 64)
REWARDS = """
def of_one(prompt, completion, label):
    return len(completion) % 7 / 7

def of_group(rows):
    return [len(row["completion"]) % 7 / 7 for row in rows]
"""
KINDS = {"verifier": "of_one", "function": "of_group"}
"""Kinds of rewards that are measured, each with its function."""
MOST = 0.05
"""The share of a step that the driver may take."""


@dataclass
class Parts:
    """Seconds of this process's processor by part; a part inside of another one is not counted in that."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    """Seconds of inner parts of each part that has begun."""

    def count(self, where: Any, name: str, part: str, after: Callable[..., object] = lambda *_: None) -> None:
        """Count a function or method as a ``part``, with what ``after`` does after it."""
        inner = getattr(where, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            self._inner.append(0.0)
            try:
                result = inner(*arguments, **named)
                after(*arguments)
                return result
            finally:
                total = time.process_time() - started
                self.seconds[part] = self.seconds.get(part, 0.0) + total - self._inner.pop()
                if self._inner:
                    self._inner[-1] += total

        setattr(where, name, counted)


def main() -> int:
    """Print a line for each kind of reward; 1 if the driver takes more than its share of a step."""
    is_within = True
    parts = Parts()
    steps: list[dict[str, float]] = []
    _count(parts, steps)
    _simulate()
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        _write_model(Path(folder) / "model")
        (Path(folder) / "rewards.py").write_text(REWARDS)
        planned = {f"{gpus}_h100": _seconds_of_step(Path(folder), gpus) for gpus in GPUS}
        resources = ResourcesConfig(
            device="cpu", trainers=1, engines=1, kv_cache_mib=16, weight_transfer="ray", progress_seconds=1e6
        )
        machines = WarmMachines(resources, Path(folder))
        try:
            for kind, function in KINDS.items():
                steps.clear()
                section = _section({kind: f"{folder}/rewards.py:{function}"})
                run_rl(
                    Path(folder) / kind, Path(folder) / "model", section, None, resources, rows=_rows(), warm=machines
                )
                figures = _figures(steps, planned)
                print(json.dumps({"reward": kind, **figures}), flush=True)
                is_within = is_within and all(figures[f"share_on_{name}"] <= MOST for name in planned)
        finally:
            machines.close()
    return 0 if is_within else 1


def _figures(steps: list[dict[str, float]], planned: dict[str, float]) -> dict[str, Any]:
    """Medians of the steps. Trainers wait for all parts but the trajectories, which a thread sends to another process."""
    by_part = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[-1]}
    total = sum(by_part.values())
    waited_for = total - by_part["trajectories"]
    return {
        "completions": PROMPTS * GENERATIONS,
        "tokens": TOKENS,
        "seconds": {name: round(value, 2) for name, value in by_part.items()},
        "waited_for_seconds": round(waited_for, 2),
        "total_seconds": round(total, 2),
        **{f"step_on_{name}_seconds": round(seconds, 1) for name, seconds in planned.items()},
        **{
            f"waited_for_share_on_{name}": round(waited_for / (waited_for + seconds), 4)
            for name, seconds in planned.items()
        },
        **{f"share_on_{name}": round(total / (total + seconds), 4) for name, seconds in planned.items()},
        "most": MOST,
    }


def _count(parts: Parts, steps: list[dict[str, float]]) -> None:
    """Count the parts of the stage; at the end of each step they are added to ``steps``."""
    parts.count(completion_text.CompletionText, "__call__", "text")
    parts.count(rewards.Rewards, "add_rewards", "rewards")
    parts.count(sampling.SyncSampler, "next_batch", "sampling")
    parts.count(loop, "to_batch", "batches")
    parts.count(loop, "add_advantages", "advantages")
    # In its own thread beside the trainers; waited for, so that its seconds are not those of other parts.
    parts.count(trajectories.Trajectories, "write", "trajectories", lambda written, *_: written.settle())
    for method in ("load", "forward", "update"):
        parts.count(policy_groups.PolicyGroups, method, "serialisation")
    parts.count(group.ActorGroup, "_get", "serialisation")

    parts.count(loop.Loop, "_step", "rest")
    step = loop.Loop._step

    def counted(*arguments: Any) -> Any:
        parts.seconds.clear()
        result = step(*arguments)
        steps.append(dict(parts.seconds))
        return result

    loop.Loop._step = counted  # type: ignore[method-assign, assignment]


def _simulate() -> None:
    """Have the stage take simulated engines and trainers."""
    warm_actors.ENGINE = simulated.ENGINE
    warm_actors.ENGINE_IMPORTS = warm_actors.TRAINER_IMPORTS = simulated.IMPORTS
    warm_actors.WarmActors._join = lambda *_: None  # type: ignore[method-assign]
    of_run: Any = import_module("alignment_core.stages.rl.run")  # the package has a function of this name
    of_run.RlJob = simulated.SimulatedJob


def _write_model(folder: Path) -> None:
    """A model with the tokenizer of a real one, and hardly any weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = real_model()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.from_pretrained(source, **small, num_key_value_heads=1, head_dim=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _rows() -> pa.Table:
    random = np.random.default_rng(0)
    return pa.table(
        {
            "prompt_ids": [random.integers(1000, 40000, PROMPT).tolist() for _ in range(PROMPTS)],
            "prompt": [f"question {number}" for number in range(PROMPTS)],
            "label": ["answer"] * PROMPTS,
            "task": pa.nulls(PROMPTS, pa.string()),
            "source": [f"rows.jsonl:{number}" for number in range(PROMPTS)],
        }
    )


def _section(reward: dict[str, Any], **prompts: Any) -> dict[str, Any]:
    return {
        "prompts": prompts or {"task": "reverse", "rows": 8},
        "steps": STEPS,
        "prompts_per_step": PROMPTS,
        "generation": {"num_generations": GENERATIONS, "max_completion_length": TOKENS},
        "rewards": [reward],
        "kl": {"coefficient": 0.001},
        "training": {"batch_size": PROMPTS * GENERATIONS // 4},
        "trajectories": {"keep": "all"},
    }


def _seconds_of_step(folder: Path, gpus: int) -> float:
    """As `align plan` counts them, for Qwen 2.5 7B."""
    content: dict[str, Any] = {
        "method": "rl",
        "rl": _section({"verifier": "math"}, path="some/prompts", max_prompt_length=PROMPT),
        "resources": {"zero_stage": 3},
    }
    content["rl"]["training"]["bf16"] = True
    recipe = recipe_of(folder, content)
    cluster = Cluster(hardware_of("h100"), gpus, Architecture.of(QWEN_2_5_7B))
    return estimate(only_work(recipe), recipe.resources, cluster).step


if __name__ == "__main__":
    sys.exit(main())
