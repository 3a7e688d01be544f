"""Continued pre-training with real trainer ranks: the perplexity is that of the models, and a kill changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import open_store
from alignment_core.execution.base import StageCall
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig
from alignment_core.stages.continued_pretraining import perplexity
from tests.stages.killing import Killer


def test_perplexity_by_hand() -> None:
    # a uniform choice among 8 costs log 8 = 2.079 nats per token
    assert perplexity(math.log(8)) == pytest.approx(8)
    assert perplexity(0) == 1
    assert math.isfinite(perplexity(1e6))


def blocks(rows: int, seed: int) -> pa.Table:
    """Blocks of which the first tokens are context."""
    random = np.random.default_rng(seed)
    ids = [random.integers(97, 105, random.integers(6, 40)).tolist() for _ in range(rows)]
    masks = [[0] * (1 + number % 4) + [1] * (len(row) - 1 - number % 4) for number, row in enumerate(ids)]
    return pa.table({"input_ids": ids, "loss_mask": masks})


def loss_of(folder: Path, table: pa.Table) -> float:
    """The model's own loss, block by block: nats per target."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats = targets = 0.0
    for row in table.to_pylist():
        ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["loss_mask"][1:])
        with torch.no_grad():
            logps = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        nats -= float((logps.gather(1, ids[0, 1:, None])[:, 0] * mask).sum())
        targets += float(mask.sum())
    return nats / targets


@pytest.mark.slow
def test_held_out_perplexity_before_and_after_is_that_of_the_models_and_a_kill_changes_nothing(
    machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    test = blocks(9, seed=2)

    def run(name: str, kill_at: int) -> tuple[Any, Any, Path]:
        store, data = open_store(tmp_path / name / "store"), tmp_path / name / "data"
        data.mkdir(parents=True)
        for split, table in (("train", blocks(24, seed=1)), ("test", test)):
            pq.write_table(table, data / f"{split}.parquet")
        inputs = {"model": store.publish(tiny_model(), "model"), "data": store.publish(data, "dataset")}
        training = {"batch_size": 6, "num_train_epochs": 3, "learning_rate": 3e-3, "adam_epsilon": 1e-5}
        call = StageCall(
            stage="continued_pretraining", label="continued-pretraining", config={"training": training}, inputs=inputs
        )
        resources = ResourcesConfig(max_tokens_per_microbatch=96, progress_seconds=1e-3, zero_stage=3)
        killer = Killer(machines(2), "trainers", kill_at)
        result = run_stage(StageRequest(store, call, machines(2), resources, killer))
        return result, result.metrics, store.fetch(result.reference)

    result, metrics, folder = run("whole", kill_at=-1)
    before, after = loss_of(tiny_model(), test), loss_of(folder, test)
    assert after < before - 1
    assert metrics["test_loss.first"] == pytest.approx(before, rel=1e-5)
    assert metrics["test_loss"] == pytest.approx(after, rel=1e-5)
    assert metrics["test_perplexity.first"] == pytest.approx(math.exp(before), rel=1e-4)
    assert metrics["test_perplexity"] == pytest.approx(math.exp(after), rel=1e-4)
    killed, of_killed, _ = run("killed", kill_at=5)
    assert killed.cost["restarts"] == 1
    assert killed.reference == result.reference
    assert of_killed["test_loss.first"] == metrics["test_loss.first"]
