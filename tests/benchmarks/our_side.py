"""Our side of the comparison with peers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from alignment_core.recipes import ResourcesConfig
from tests.benchmarks.laps import LAPS, THREADS, Laps, Rows
from tests.benchmarks.peer_rows import BATCH, COMPLETION, COMPLETIONS, PROMPTS

RESOURCES = ResourcesConfig(device="cpu", trainers=1, engines=1, threads=THREADS, wait_timeout_seconds=600)
SIDES = ("chosen_ids", "rejected_ids")


def our_trainer(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """SFT or DPO, with the passes of the reference: all rows, in steps of ``BATCH``, are a lap."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes import DpoLossConfig, TrainingConfig
    from alignment_core.training.forward import ForwardJob
    from alignment_core.training.methods.dpo import Dpo
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.ranks import join
    from alignment_core.training.trainer import TrainJob

    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=model.parent))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    device = Device.detect("cpu")
    join(0, 1, f"file://{folder}/meet", RESOURCES, device)
    training = TrainingConfig(batch_size=BATCH, num_train_epochs=1000, lr_scheduler_type="constant")
    policy = Model(model, Reference("model", "0" * 64))
    method: Any = Sft()
    logps: Path | None = None
    pairs = [(row["prompt_ids"], row[side]) for row in rows for side in SIDES if side in row]
    reference = ForwardJob(policy, "lm").open(RESOURCES, device)
    if pairs:
        method, logps = Dpo(DpoLossConfig()), folder / "logps.parquet"
        chosen, rejected = reference.run(pairs).reshape(-1, 2).T
        table = {
            "split": ["train"] * len(rows),
            "row": range(len(rows)),
            "chosen_logp": chosen,
            "rejected_logp": rejected,
        }
        pq.write_table(pa.table(table), logps)
    train_data = folder / "train.parquet"
    trainer = TrainJob(method, policy, logps, train_data, None, training, 0).open(RESOURCES, device, 0, 1)
    trainer.prepare(None)
    while True:
        if pairs:
            laps.timed("reference", reference.run)(pairs)
        laps.timed("training", trainer.train)(len(rows) // BATCH, 1e9)
        laps.over()


def our_rl(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Steps of the whole stage: an engine samples, a trainer trains, each in its own actor."""
    import pyarrow as pa

    from alignment_core.execution.machines import WarmMachines
    from alignment_core.stages.rl.loop import Loop
    from tests.stages.rl_runs import run_rl

    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=model.parent))
    (folder / "reward.py").write_text(
        'def distinct(rows):\n    return [float(len(set(row["completion"]))) for row in rows]\n'
    )
    section = {
        "prompts": {"task": "reverse", "rows": 8},
        "steps": LAPS + 1,
        "prompts_per_step": PROMPTS,
        "generation": {"num_generations": COMPLETIONS, "max_completion_length": COMPLETION},
        "rewards": [{"function": f"{folder / 'reward.py'}:distinct"}],
        "advantage": {"estimator": "group", "scale_rewards": "group"},
        "training": {"batch_size": PROMPTS * COMPLETIONS, "lr_scheduler_type": "constant", "learning_rate": 1e-6},
    }
    Loop._update = laps.timed("training", Loop._update)  # type: ignore[method-assign]

    def report(done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
        if done:
            assert metrics["completion_length"] == COMPLETION
            with suppress(EOFError):  # after the last step the stage ends by itself
                laps.over()

    table = pa.Table.from_pylist([{**row, "label": None, "task": None} for row in rows])
    machines = WarmMachines(RESOURCES, folder)
    try:
        run_rl(folder / "run", model, section, lambda _: machines, RESOURCES, report, rows=table)
    finally:
        machines.close()
