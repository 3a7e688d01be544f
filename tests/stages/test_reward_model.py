"""The stage that trains a reward model: its files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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


def test_the_mean_and_deviation_of_its_rewards_lie_beside_the_weights(
    machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    ids = [[random.integers(0, 256, 6).tolist() for _ in range(8)] for _ in range(3)]
    table = pa.table(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
    table = table.append_column("margin", pa.nulls(8, pa.float32()))
    store, model, data = store_with(tmp_path, tiny_model(), table)
    run = Runs(store, machines(1))
    training = TrainingConfig(batch_size=4, learning_rate=1e-3, max_steps=2, lora=LoraConfig(r=4))
    with composing(run):
        submit("reward_model", "judge", RewardModelStageConfig(training=training), {"model": model, "data": data})
    result = run.results["judge"]
    folder = store.fetch(result.reference)
    left = json.loads((folder / "rewards.json").read_text())
    job = ForwardJob(Model(folder, Reference("reward-model", "0" * 64)), "score")
    prompts, chosen, rejected = ids
    pairs = [pair for p, c, r in zip(prompts, chosen, rejected, strict=True) for pair in ((p, c), (p, r))]
    scores = job.open(ResourcesConfig(), Device("cpu", 1)).run(pairs).astype(float)
    assert (left["mean"], left["deviation"]) == pytest.approx((scores.mean(), scores.std()), rel=1e-4)
    assert left["answers"] == 16
    adapter = store.fetch(result.outputs["adapter"])
    assert json.loads((adapter / "rewards.json").read_text()) == left, "merged, it is the same reward model"
    assert result.metrics["reward_mean"] == left["mean"]
