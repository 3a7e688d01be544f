"""The learner in bf16 on one rank: its first loss is that of `transformers`, it learns rows by heart, and resumes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from alignment_core.cluster.device import Device
from alignment_core.models.microbatch import Row
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.methods.sft import Sft
from alignment_core.training.ranks import join
from alignment_core.training.step_report import StepReport
from tests.gpu.size import grouped_rows, size_on, stored_model, the_device

STEPS, RATE = 12, 1e-3
MOST = {"cpu": 0.0, "cuda": 5e-3}
"""Greatest difference of the second loss after a resume; on a GPU sums of gradients are in any order."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 2, offloaded": {"zero_stage": 2, "offload_optimizer": True, "progress": "store"},
    "ZeRO 3": {"zero_stage": 3, "overlap_comm": True},
}


def run(kind: str) -> dict[str, Any]:
    """Each layout in turn."""
    device, size, figures = the_device(kind), size_on(kind), dict[str, Any]()
    rows = grouped_rows(size)
    with joined(device), tempfile.TemporaryDirectory() as folder:
        model = stored_model(Path(folder, "model"), size)
        expected = _loss_of_transformers(model, rows, device.torch_device)
        figures["first loss of transformers"] = expected
        for name, wanted in LAYOUTS.items():
            losses = _losses(model, rows, device, Path(folder, name), wanted)
            first, last, resumed, again = losses
            figures[f"losses, {name}"] = f"{first:.4f} at first, {last:.4f} after {STEPS} steps"
            assert abs(first - expected) < 0.02, (
                f"{name}: the first loss is {first:.4f}, that of transformers {expected:.4f}"
            )
            assert last < 0.9 * first, f"{name}: {STEPS} steps lower the loss from {first:.4f} to {last:.4f} alone"
            assert abs(resumed - again) <= MOST[kind], (
                f"{name}: after a resume the loss is {again:.5f} instead of {resumed:.5f}"
            )
    return figures


@contextmanager
def joined(device: Device) -> Iterator[None]:
    """This process as the only rank."""
    resources = ResourcesConfig(device=device.kind, trainers=1, threads=1)
    os.environ |= device.trainer_environment(resources, 1)
    with tempfile.TemporaryDirectory() as folder:
        join(0, 1, f"file://{folder}/meet", resources, device)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def new_learner(model: Model, device: Device, **wanted: Any) -> Learner:
    """A learner in bf16."""
    resources = ResourcesConfig(device=device.kind, trainers=1, threads=1, **wanted).on(device.kind)
    training = TrainingConfig(bf16=True, learning_rate=RATE, lr_scheduler_type="constant")
    return Learner(ModelSource(model, "lm"), training, resources, device, 0, 1)


def step(learner: Learner, rows: list[Row]) -> float:
    """The loss per target of a step, before it."""
    sft, report = Sft(), StepReport()
    targets = sft.normaliser(rows)
    learner.step([Term(rows, lambda output, batch: sft.loss(output, batch, None), targets, report)], RATE)
    return report.sums["loss"] / targets


def _losses(model: Model, rows: list[Row], device: Device, folder: Path, wanted: dict[str, Any]) -> list[float]:
    """The first loss, the last one, and twice the loss of the step after a checkpoint."""
    learner = new_learner(model, device, **wanted)
    losses = [step(learner, rows) for _ in range(STEPS)]
    learner.save(folder)
    resumed = step(learner, rows)
    resumed = step(learner, rows)
    learner.close()
    other = new_learner(model, device, **wanted)
    other.restore(folder, STEPS)
    step(other, rows)
    again = step(other, rows)
    other.close()
    return [losses[0], losses[-1], resumed, again]


def _loss_of_transformers(model: Model, rows: list[Row], device: str) -> float:
    plain = model.load("lm", torch.bfloat16).to(device)
    total = count = 0.0
    for row in rows:
        (sequence,) = row.sequences
        ids = torch.from_numpy(sequence.ids)[None].to(device)
        labels = torch.where(torch.from_numpy(sequence.targets)[None].to(device), ids, -100)
        targets = int(sequence.targets.sum())
        with torch.no_grad():
            total += targets * float(plain(input_ids=ids, labels=labels, use_cache=False).loss)
        count += targets
    return total / count
