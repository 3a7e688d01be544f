"""The stage that trains a reward model: its files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.composition.graph import composing, submit
from alignment_core.models.model_ref import Model
from alignment_core.recipes import LoraConfig, ResourcesConfig, TrainingConfig
from alignment_core.stages.reward_model import RewardModelStageConfig
from alignment_core.training.forward import ForwardJob
from tests.composed import Runs
from tests.stages.killing import store_with


def test_the_mean_and_deviation_of_its_rewards_lie_beside_the_weights_of_each_model(
    machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    ids = [[random.integers(0, 256, 6).tolist() for _ in range(8)] for _ in range(3)]
    table = pa.table(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
    table = table.append_column("margin", pa.nulls(8, pa.float32()))
    store, model, _ = store_with(tmp_path, tiny_model(), table)
    # What is chosen is rejected in the held-out rows: each step makes them worse, so that the first of two is the best.
    swapped = table.rename_columns(["prompt_ids", "rejected_ids", "chosen_ids", "margin"])
    pq.write_table(swapped, tmp_path / "data" / "test.parquet")
    data = store.publish(tmp_path / "data", "dataset")
    run = Runs(store, machines(1))
    training = TrainingConfig(
        batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        num_train_epochs=2,
        eval_steps=1,
        metric_for_best_model="loss",
        save_steps=1,
        lora=LoraConfig(r=4),
    )
    with composing(run):
        submit("reward_model", "judge", RewardModelStageConfig(training=training), {"model": model, "data": data})
    result = run.results["judge"]
    folders = {name: store.fetch(output) for name, output in result.outputs.items()}
    spreads = {name: json.loads((folder / "rewards.json").read_text()) for name, folder in folders.items()}
    assert spreads.keys() == {"reward-model", "last", "adapter", "checkpoint-1"}
    prompts, chosen, rejected = ids
    pairs = [pair for p, c, r in zip(prompts, chosen, rejected, strict=True) for pair in ((p, c), (p, r))]
    for name in ("reward-model", "last", "checkpoint-1"):
        job = ForwardJob(Model(folders[name], Reference("reward-model", "0" * 64)), "score")
        scores = job.open(ResourcesConfig(), Device("cpu", 1)).run(pairs).astype(float)
        spread = spreads[name]
        assert (spread["mean"], spread["deviation"]) == pytest.approx((scores.mean(), scores.std()), rel=1e-4), name
        assert spread["answers"] == 16
    assert spreads["last"] != spreads["reward-model"], "each model has its own"
    assert spreads["adapter"] == spreads["reward-model"], "merged, it is the same reward model"
    assert result.metrics["reward_mean"] == spreads["reward-model"]["mean"]
