"""Linear layers with biases, as in Qwen 2.5, at ZeRO stage 3, where DeepSpeed replaces them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.models.model_ref import Model
from alignment_core.training.methods.sft import Sft
from alignment_core.training.trainer import TrainJob
from tests.training.conftest import MODEL
from tests.training.test_sequence_parallel_training import check_equal, result

pytestmark = pytest.mark.slow


@pytest.fixture
def job(make_job: Any, tiny_model: Any) -> TrainJob:
    return replace(make_job(Sft()), model=Model(tiny_model("qwen2"), MODEL))


def test_recomputed_layers_add_their_biases_once(job: TrainJob, machines: Any, tmp_path: Path) -> None:
    """The biases are zero before the first of three steps."""
    one = result(machines, job, tmp_path / "one", world=1)
    recomputed = result(machines, job, tmp_path / "two", zero_stage=3, gradient_checkpointing="selective")
    check_equal(recomputed, one)


def test_later_jobs_of_the_processes_have_the_linear_layers_of_pytorch(
    job: TrainJob, machines: Any, tmp_path: Path
) -> None:
    first = result(machines, job, tmp_path / "first")
    result(machines, job, tmp_path / "parts", steps=1, zero_stage=3)
    later = result(machines, job, tmp_path / "later")
    assert all(torch.equal(later.weights[name], weight) for name, weight in first.weights.items())
    with machines(2).trainers() as trainers:
        linear = trainers.group.run_on(range(2), getattr, torch.nn.functional, "linear")
    assert linear == [torch.nn.functional.linear] * 2
