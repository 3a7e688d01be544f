"""Our side of the comparison with peers, as users get it: trainers and engines are actors of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.recipes import ResourcesConfig
from tests.benchmarks.laps import THREADS, Laps, Rows
from tests.benchmarks.peer_rows import BATCH, LEAST_FULL

if TYPE_CHECKING:
    from alignment_core.cluster.device import Device
    from alignment_core.training.forward import ForwardJob
    from alignment_core.training.trainer import TrainJob

ONE = {"trainers": 1, "engines": 1, "threads": THREADS}
"""One process of each kind."""
SIDES = ("chosen_ids", "rejected_ids")


def _resources(settings: Mapping[str, Any]) -> ResourcesConfig:
    """Those of the settings; no progress is saved, because the peers save none."""
    more = {"wait_timeout_seconds": 600, "progress_seconds": 1e6}
    return ResourcesConfig(device="cpu", **more, **settings.get("resources", ONE))


@dataclass(frozen=True)
class BothJobs:
    """A training, and the passes of its reference."""

    training: TrainJob
    reference: ForwardJob

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> Both:
        trainer = self.training.open(resources, device, rank, world)
        return Both(trainer.train, trainer.close, self.reference.open(resources, device).run)


@dataclass
class Both:
    """One rank's methods of both jobs."""

    train: Callable[..., Any]
    close: Callable[[], None]
    run: Callable[..., Any]


def our_trainer(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """SFT or DPO, with the passes of the reference: all rows, in steps of ``BATCH``, are a lap."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.actor import call
    from alignment_core.execution.machines import WarmMachines
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes import DpoLossConfig, TrainingConfig
    from alignment_core.training.forward import Forward, ForwardJob
    from alignment_core.training.methods.dpo import Dpo
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.ranks import open_job
    from alignment_core.training.trainer import Trainer, TrainJob

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    data, logps = folder / "train.parquet", folder / "logps.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    training = TrainingConfig(
        batch_size=BATCH, num_train_epochs=1000, lr_scheduler_type="constant", bf16=settings.get("bf16", False)
    )
    policy = Model(model, Reference("model", "0" * 64))
    reference = ForwardJob(policy, "lm")
    pairs = [(row["prompt_ids"], row[side]) for row in rows for side in SIDES if side in row]
    resources = _resources(settings)

    def passes(ranks: Any) -> list[float]:
        blocks = [call(Forward.run, pairs[first : first + BATCH]) for first in range(0, len(pairs), BATCH)]
        values = dict(ranks.spread(enumerate(blocks)))
        return [float(value) for number in range(len(blocks)) for value in values[number]]

    machines = WarmMachines(resources, folder)
    try:
        with machines.trainers() as trainers:
            method: Any = Dpo(DpoLossConfig()) if pairs else Sft()
            job: Any = TrainJob(method, policy, logps if pairs else None, data, None, training, 0)
            if pairs:
                values = passes(open_job(trainers, reference, resources))
                columns = {"chosen_logp": values[::2], "rejected_logp": values[1::2]}
                pq.write_table(pa.table({"split": ["train"] * len(rows), "row": range(len(rows)), **columns}), logps)
                job = BothJobs(job, reference)
            ranks: Any = open_job(trainers, job, resources)
            while True:
                if pairs:
                    laps.timed("reference", passes)(ranks)
                laps.timed("training", ranks.all)(Trainer.train, len(rows) // BATCH, 1e9)
                laps.over()
    finally:
        machines.close()


def our_engines(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Completions of all prompts by the engines of the generation stage, in shards."""
    from alignment_core.artifacts import Reference
    from alignment_core.cluster.actor import call
    from alignment_core.execution.machines import WarmMachines
    from alignment_core.inference.engine import Engine, EngineRequest
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes import GenerationConfig

    completions, length = settings["completions"], settings["length"]
    policy = Model(model, Reference("model", "0" * 64))
    config = GenerationConfig(num_generations=completions, max_completion_length=length)
    prompts = [row["prompt_ids"] for row in rows]
    shards = [prompts[first : first + settings["shard"]] for first in range(0, len(prompts), settings["shard"])]
    machines = WarmMachines(_resources(settings), Path(tempfile.mkdtemp(prefix="bench-")))
    try:
        with machines.engines(EngineRequest(policy, max(map(len, prompts)) + length)) as engines:
            while True:
                calls = (
                    call(Engine.generate, str(policy.reference), shard, config, settings["stop_ids"], number)
                    for number, shard in enumerate(shards)
                )
                tokens = sum(len(shard.token_ids) for _, shard in engines.spread(enumerate(calls)))
                assert tokens >= LEAST_FULL * len(prompts) * completions * length
                laps.over()
    finally:
        machines.close()


def our_rl(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Steps of the whole stage: engines sample, trainers train, each in its own actor."""
    import pyarrow as pa

    from alignment_core.execution.machines import WarmMachines
    from alignment_core.stages.rl.loop import Loop
    from tests.stages.rl_runs import run_rl

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    (folder / "reward.py").write_text(
        'def distinct(rows):\n    return [float(len(set(row["completion"]))) for row in rows]\n'
    )
    completions, length = settings["completions"], settings["length"]
    section = {
        "prompts": {"task": "reverse", "rows": 8},
        "steps": settings["steps"],
        "prompts_per_step": len(rows),
        "generation": {"num_generations": completions, "max_completion_length": length},
        "rewards": [{"function": f"{folder / 'reward.py'}:distinct"}],
        "advantage": {"estimator": "group", "scale_rewards": "group"},
        "training": {"batch_size": len(rows) * completions, "lr_scheduler_type": "constant", "learning_rate": 1e-6},
    }
    Loop._update = laps.timed("training", Loop._update)  # type: ignore[method-assign]

    def report(done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
        if done:
            assert metrics["completion_length"] >= LEAST_FULL * length
            with suppress(EOFError):  # after the last step the stage ends by itself
                laps.over()

    table = pa.Table.from_pylist([{**row, "label": None, "task": None} for row in rows])
    resources = _resources(settings)
    machines = WarmMachines(resources, folder)
    try:
        run_rl(folder / "run", model, section, lambda _: machines, resources, report, rows=table)
    finally:
        machines.close()
