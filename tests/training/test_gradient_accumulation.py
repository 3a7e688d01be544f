"""Gradients of a step in bf16 are added up over its micro-batches in fp32, for any ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from alignment_core.models.loading import load_model
from alignment_core.training.methods.sft import Sft
from alignment_core.training.resumable import save_progress
from tests.matrix import cases
from tests.training.conftest import portable, random_ids
from tests.training.test_trainer_ranks import open_job, train

pytestmark = pytest.mark.slow
ROWS = 300


def demonstrations() -> pa.Table:
    random = np.random.default_rng(0)
    ids = [random_ids(random, 17, 24) for _ in range(ROWS)]
    return pa.table({"input_ids": ids, "loss_mask": [[1] * len(row) for row in ids]})


def of_torch(folder: Path, table: pa.Table) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss per target by plain ``transformers`` in fp32, at weights that are rounded to bf16."""
    model = load_model(str(folder), "lm", torch.bfloat16).float()
    rows = Sft().rows(table)
    for row in rows:
        ids = torch.from_numpy(row.sequences[0].ids)
        logits = model(ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        (loss / Sft().normaliser(rows)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "resources"),
    cases(
        [
            (1, {"zero_stage": 0}),
            (2, {"zero_stage": 0}),
            (2, {"zero_stage": 1}),
            (2, {"zero_stage": 2}),
            (2, {"zero_stage": 3}),
            (2, {"zero_stage": 1, "offload_optimizer": True}),
            (2, {"zero_stage": 2, "offload_optimizer": True}),
        ],
        usual=[(2, {"zero_stage": 3})],
    ),
)
def test_the_gradient_of_many_micro_batches_is_that_of_fp32(
    world: int, resources: dict[str, Any], make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """AdamW's first step is rate · g / (|g| + ε): with a rate and an ε of 10⁴ it is g. The checkpoint for the store holds the
    master weights. bf16 rounds each number to 8 digits, so that one micro-batch is off by 0.4 % at most of what it gives; added
    up in bf16, the sum of 300 is off by 5 %."""
    table = demonstrations()
    settings = {"batch_size": ROWS, "num_train_epochs": 1, "max_grad_norm": 1e6, "lr_scheduler_type": "constant"}
    job = make_job(Sft(), table, learning_rate=1e4, adam_epsilon=1e4, bf16=True, **settings)
    start = load_file(job.model.path / "model.safetensors")
    with machines(world).trainers() as group:
        options = {**resources, "progress": "store", "max_tokens_per_microbatch": 16}
        ranks = open_job(group, machines(world), job, tmp_path / "run", **options)
        train(ranks, 1)
        save_progress([ranks], tmp_path / "run")
    stored = portable(tmp_path / "run" / "step-00000001")
    expected = of_torch(job.model.path, table)
    steps = {name: start[name].bfloat16().float() - stored[f"weights.model.{name}"] for name in expected}
    error, size = (
        torch.cat([gradient.flatten() for gradient in parts]).norm()
        for parts in ([steps[name] - expected[name] for name in expected], list(expected.values()))
    )
    assert float(error / size) < 0.01
