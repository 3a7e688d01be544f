"""Sampling ahead of training against sampling in turn with it where rewards are slow; weights over each channel."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.ray_cluster import actor_processes
from alignment_core.execution.machines import WarmMachines
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.scratch import create_model
from alignment_core.recipes import ResourcesConfig, RlConfig, ScratchModel
from alignment_core.stages.rl.weights import WeightSync
from alignment_core.training.policy_groups import PolicyGroups, open_groups
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob
from alignment_core.training.rank_folders import write
from alignment_core.training.resumable import resume
from tests.stages.rl_runs import run_rl

DELAY, STEPS, REPEATS, WAIT = 0.5, 12, 3, 300.0
SLOW_REWARD = f"""
import asyncio

async def slow(rows):
    await asyncio.sleep({DELAY})
    return [len(set(row["completion"])) / (1 + len(row["completion"])) for row in rows]
"""


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))
    (folder / "slow.py").write_text(SLOW_REWARD)
    small = ScratchModel(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    large = ScratchModel(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8)
    create_model(small, None, 0, folder / "small")
    parameters = create_model(large, None, 0, folder / "large")
    resources = ResourcesConfig(device="cpu", trainers=1, engines=1, kv_cache_mib=64, wait_timeout_seconds=WAIT)
    machines = WarmMachines(resources, folder)
    try:
        print(json.dumps(_ahead(folder, machines, resources)))
        print(json.dumps({"parameters": parameters, **transfer(folder / "large", folder, machines, resources)}))
    finally:
        machines.close()


def _ahead(folder: Path, machines: WarmMachines, resources: ResourcesConfig) -> dict[str, Any]:
    """Seconds of a step of the whole stage, in turn and ahead, with a reward that takes its time."""

    def seconds(name: str, **execution: Any) -> float:
        section = {
            "prompts": {"task": "reverse", "rows": 8},
            "steps": STEPS,
            "prompts_per_step": 8,
            "generation": {"num_generations": 8, "max_completion_length": 48},
            "rewards": [{"function": f"{folder / 'slow.py'}:slow"}],
            "training": {"batch_size": 64, "learning_rate": 1e-5},
            "execution": execution,
        }
        times: list[float] = []
        run_rl(
            folder / name,
            folder / "small",
            section,
            lambda _: machines,
            resources,
            lambda *_: times.append(time.monotonic()),
        )
        return statistics.median(later - earlier for earlier, later in pairwise(times[1:]))

    in_turn, ahead = seconds("in-turn"), seconds("ahead", max_staleness=1)
    return {
        "reward_delay_seconds": DELAY,
        "step_in_turn_seconds": round(in_turn, 3),
        "step_ahead_seconds": round(ahead, 3),
        "in_turn_over_ahead": round(in_turn / ahead, 2),
    }


def transfer(model: Path, folder: Path, machines: WarmMachines, resources: ResourcesConfig) -> dict[str, Any]:
    """Seconds of an update of a running engine's weights by a trainer, and of processor time in both together."""
    from alignment_core.artifacts import Reference

    section = RlConfig.model_validate({"prompts": {"task": "reverse", "rows": 8}, "rewards": [{"verifier": "task"}]})
    policy = Model(model, Reference.parse(f"model@sha256:{'0' * 64}"))
    progress = folder / "progress"
    progress.mkdir()
    with machines.engines_and_trainers(EngineRequest(policy, 128)) as (engines, trainers):
        ranks = open_groups(trainers, RlJob(section, policy, None, 0), resources)
        resume(ranks.groups, progress)
        kinds: tuple[Any, ...] = ("memory", "broadcast", "ray")
        updates = {kind: partial(_synced(kind, section, engines, ranks, resources, machines).send, 1) for kind in kinds}
        times: dict[str, list[float]] = {name: [] for name in (*kinds, "folder")}
        processor: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind, update in updates.items():
            update()  # opens the channel, and gets the memory that later updates use again
            for _ in range(REPEATS):
                before = _processor_seconds()
                times[kind].append(_timed(update))
                processor[kind].append(_processor_seconds() - before)
        for _ in range(REPEATS):
            times["folder"].append(_timed(lambda: _over_a_folder(ranks.policy, engines, folder / "weights")))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        **{f"{kind}_seconds": round(medians[kind], 3) for kind in kinds},
        **{f"{kind}_processor_seconds": round(statistics.median(processor[kind]), 2) for kind in kinds},
        "folder_over_memory": round(medians["folder"] / medians["memory"], 2),
    }


def _synced(
    kind: Literal["memory", "broadcast", "ray"],
    section: RlConfig,
    engines: ActorGroup[Engine],
    ranks: PolicyGroups,
    resources: ResourcesConfig,
    machines: WarmMachines,
) -> WeightSync:
    """The sync of the stage, over this kind of channel."""
    own = resources.model_copy(update={"weight_transfer": kind})
    context: Any = SimpleNamespace(resources=own, machines=machines, inputs={})
    return WeightSync(context, section, engines, ranks, "policy")


def _processor_seconds() -> float:
    """Of all actors."""
    return sum(sum(process.cpu_times()[:2]) for process in actor_processes())


def _over_a_folder(ranks: ActorGroup[PolicyTrainer], engines: ActorGroup[Engine], folder: Path) -> None:
    write(ranks, [folder], PolicyTrainer.export, "policy", folder)
    engines.all(Engine.load, folder, f"policy {time.monotonic()}")


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
