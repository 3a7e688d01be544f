"""Training on fixed data on one rank: the steps of every method, with checkpoints that resume exactly.

A step depends on (job, step) alone: which rows, how they are cut, the learning rate, the dropout seed. So a resumed run needs
only the weights, the optimiser and the number of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment_core.artifacts.reference import MASTERS
from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device
from alignment_core.data.turn_end import chat_template_of
from alignment_core.errors import NumericError
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import run_packed
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.checkpoints import described
from alignment_core.training.collectives import agree, sum_over_ranks
from alignment_core.training.frozen import FrozenModel
from alignment_core.training.learner import Learner, Loss, ModelSource, Term
from alignment_core.training.methods.base import BatchMethod, TrainingMethod
from alignment_core.training.moving_reference import MovingReference
from alignment_core.training.reference import ReferenceLogps
from alignment_core.training.schedule import learning_rate, whole_steps
from alignment_core.training.step_report import MetricSums, StepReport
from alignment_core.training.training_rows import (
    Rows,
    batch_of_step,
    first_rows,
    rows_before,
    shuffles,
    steps_per_epoch,
    table_has_images,
    training_rows,
)


@dataclass(frozen=True)
class TrainJob:
    """A training job: plain data that travels to every rank. Paths are those of the rank's own machine."""

    method: TrainingMethod
    model: Model
    reference_logps: Path | None
    """Output of the stage of this name for the same data, for a method that needs it."""
    train_data: Path
    test_data: Path | None
    training: TrainingConfig
    seed: int
    reference: Model | None = None
    """Initial reference of a method whose reference follows the policy (``sync``); None: the policy."""
    sync: ReferenceSyncConfig | None = None
    scratch: Path | None = None
    """Folder for rows that are not in memory; None: the folder for temporary files."""
    masters: Path | None = None
    """fp32 master weights of ``model``, see :mod:`alignment_core.models.masters`."""
    saves_masters: bool = False
    """Whether the trained model is exported with its master weights."""
    dropout: bool = False
    """Whether the model's own dropout is on; that of LoRA adapters always is."""
    neftune_noise_alpha: float = 0.0
    """Scale of the noise on embeddings, for rows of one sequence; see :mod:`alignment_core.models.neftune`."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> Trainer:
        """The trainer of one rank."""
        return Trainer(self, resources, device, rank, world)


class Trainer:
    """Trains one job on this rank. Create it on every rank at once; its methods are collective."""

    def __init__(self, job: TrainJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job = job
        self.device = device
        self.rank = rank
        self.rows = training_rows(job.train_data, job.method, job.scratch)
        self.shuffles = shuffles(job.train_data)
        self.test_rows = list(training_rows(job.test_data, job.method, job.scratch)) if job.test_data else []
        self.rows_before: dict[str, Rows] = {"train": [], "test": []}
        if isinstance(job.method, BatchMethod):
            self.rows_before["train"] = rows_before(job.train_data, job.method, self.rows, job.scratch)
            if job.test_data and getattr(job.method, "passes_held_out", True):
                self.rows_before["test"] = rows_before(job.test_data, job.method, self.test_rows, job.scratch)
        config = job.training
        planned = whole_steps(config.num_train_epochs, steps_per_epoch(len(self.rows), config.batch_size))
        self.total_steps = min(planned, config.max_steps or planned)
        self.reference: ReferenceLogps | None = None
        if job.reference_logps is not None:
            train = first_rows(self.total_steps * config.batch_size, len(self.rows), job.seed, self.shuffles)
            needed = {"train": train, "test": range(len(self.test_rows))}
            self.reference = ReferenceLogps.read(job.reference_logps, needed)
        source = ModelSource(
            job.model,
            job.method.head,
            head_seed=derive_seed(job.seed, "head"),
            adapter_seed=derive_seed(job.seed, "adapters"),
            dropout=job.dropout,
            masters=job.masters,
            neftune_noise_alpha=job.neftune_noise_alpha,
            noise_seed=derive_seed(job.seed, "noise"),
            chat_template=chat_template_of(job.train_data.parent),
            has_images=any(table_has_images(table) for table in (job.train_data, job.test_data) if table),
        )
        self.learner = Learner(source, config, resources, device, rank, world)
        if job.method.head == "lm":
            self.learner.packed.vocabulary.of_sum = getattr(job.method, "loss_is_sum", False)
        self.engine = self.learner.engine
        self.moving: MovingReference | None = None
        if job.sync is not None:
            dtype = torch.bfloat16 if config.bf16 else torch.float32
            share = self.learner.packed.shares_prefixes
            start = job.reference or job.model
            frozen = FrozenModel(
                start,
                job.method.head,
                dtype,
                resources,
                device,
                rank,
                self.learner.world,
                share,
                has_images=source.has_images,
            )
            self.moving = MovingReference(frozen, self.learner, job.sync.sync_steps, job.sync.mixup_alpha)

    def layout(self) -> dict[str, Any]:
        """Properties that a checkpoint must share with this job."""
        return self.learner.layout()

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Continue from a complete checkpoint, if there is one; returns the progress of the job."""
        if self.moving:
            # Before the reference moves, so that held-out losses of all steps compare with the same policy.
            self.reference = ReferenceLogps({"test": self._held_out_logps(self.moving)})
        if checkpoint is not None:
            self.learner.restore(checkpoint, described(checkpoint)["step"])
            if self.moving:
                self.moving.restore(checkpoint)
        return {
            "step": self.learner.steps,
            "total_steps": self.total_steps,
            "rows": len(self.rows),
            "parameters": self.learner.parameters(),
        }

    def train(self, steps: int, seconds: float) -> StepReport:
        """Take up to ``steps`` optimiser steps, fewer if ``seconds`` are over by rank 0's clock."""
        report = StepReport()
        started = time.monotonic()
        for _ in range(min(steps, self.total_steps - self.learner.steps)):
            of_step = StepReport()
            self._step(of_step)
            report.add(of_step)
            # By one clock: ranks that took different numbers of steps would wait for each other in a collective.
            if agree(time.monotonic() - started > seconds, self.device.torch_device):
                break
        report.seconds = time.monotonic() - started
        return report

    def _step(self, report: StepReport) -> None:
        job = self.job
        step = self.learner.steps
        numbers = batch_of_step(step, len(self.rows), job.training.batch_size, job.seed, self.shuffles)
        batch = [self.rows[number] for number in numbers]
        torch.manual_seed(derive_seed(job.seed, "step", step, self.rank))  # for dropout, if the model has any
        rate = learning_rate(job.training, step, self.total_steps)
        method = self._method_of("train", batch, step / max(1, self.total_steps - 1))
        try:
            term = Term(batch, self._loss_of("train", method), job.method.normaliser(batch), report)
            self.learner.step([term], rate)
            if self.moving:
                self.moving.after(self.learner.steps)
        except NumericError as error:
            raise self._numeric_error(str(error), numbers) from None

    def _loss_of(self, split: str, method: TrainingMethod) -> Loss:
        def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return method.loss(output, micro, self._reference_of(split, micro))

        return loss

    def _reference_of(self, split: str, micro: MicroBatch, first: int = 0) -> torch.Tensor | None:
        """The reference's log-probabilities of a micro-batch, [S], from column ``first`` on; None if there is no reference."""
        if self.moving and split == "train":
            return self.moving.logps_of(micro)
        return self.reference.of(split, micro, first) if self.reference else None

    def _held_out_logps(self, reference: MovingReference) -> np.ndarray:
        """Log-probabilities of the held-out rows under the reference as it is now, in nats: [rows, columns] float32, with
        columns as in :class:`ReferenceLogps`."""
        columns = []
        parts = [self.test_rows]
        if isinstance(self.job.method, BatchMethod) and not self.job.method.passes_trained_rows:
            parts.append(list(self.rows_before["test"]))
        for rows in filter(None, parts):
            # Zero where other ranks compute, so that the sum over ranks is the whole.
            logps_BS = torch.zeros(len(rows), len(rows[0].sequences), device=self.device.torch_device)
            for micro in self.learner.micro_batches(rows):
                logps_S = reference.logps_of(micro).float()
                if micro.rows:
                    logps_BS[[row.number for row in micro.rows]] = logps_S.view(len(micro.rows), -1)
            columns.append(sum_over_ranks(logps_BS, self.learner.counts).cpu().numpy())
        return np.concatenate(columns, axis=1) if columns else np.zeros((0, 0), np.float32)

    def _method_of(self, split: str, rows: Sequence[Row], done: float | None = None) -> TrainingMethod:
        """The method for a batch; if its loss depends on the whole batch, after a pass over it without gradient.

        ``done`` is the fraction of all steps that are done, in training.
        """
        method = self.job.method
        if not isinstance(method, BatchMethod):
            return method
        before = self.rows_before[split]
        sums: list[torch.Tensor] = []
        first = 0 if method.passes_trained_rows else len(rows[0].sequences)
        for micro in self.learner.micro_batches([before[row.number] for row in rows] if len(before) else []):
            reference = self._reference_of(split, micro, first)
            with torch.no_grad():
                sums.append(method.sums_before(run_packed(self.engine, micro), micro, reference).double())
        counts = self.learner.counts
        return method.of_batch(rows, sum_over_ranks(torch.stack(sums).sum(0), counts) if sums else None, done)

    def _numeric_error(self, reason: str, numbers: Sequence[int]) -> NumericError:
        """An error that names the step and every row of its batch, with the row's place in the user's data if that is known."""
        sources = _sources(self.job.train_data)
        rows = ", ".join(f"{number} ({sources[number]})" if sources else str(number) for number in numbers)
        return NumericError(
            f"{reason} at step {self.learner.steps} of {self.total_steps}; the rows of its batch are {rows}"
        )

    def evaluate(self) -> StepReport:
        """Loss and metrics on the held-out rows, without gradients."""
        report = StepReport()
        loss = self._loss_of("test", self._method_of("test", self.test_rows))
        report.normaliser = self.job.method.normaliser(self.test_rows) if self.rank == 0 else 0.0
        sums = MetricSums()
        for micro in self.learner.micro_batches(self.test_rows):
            with torch.no_grad():
                sums.add(loss(run_packed(self.engine, micro), micro)[1])
        if self.learner.counts:
            report.sums.update(sums.read())
        return report

    def export(self, directory: Path, parts: bool = True) -> None:
        """Write the trained model as a Hugging Face folder, and with ``parts`` adapters of LoRA and master weights into folders
        in it (rank 0 writes, all ranks take part)."""
        adapter = directory / ADAPTER if parts else None
        masters = directory / MASTERS if parts and self.job.saves_masters else None
        self.learner.export(directory, adapter=adapter, masters=masters)

    def close(self) -> None:
        """Free the models' memory."""
        self.learner.close()
        if self.moving:
            self.moving.frozen.close()

    def describe(self) -> dict[str, Any]:
        """The description of a checkpoint of this step."""
        self.learner.check_consistent()
        return {"step": self.learner.steps, "layout": self.layout()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""
        self.learner.save(folder)
        if self.moving:
            self.moving.save(folder, self.learner.steps)


def _sources(path: Path) -> Any:
    """The column with the places of a table's rows in the user's data, if it has one."""
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    return pyarrow.parquet.read_table(path, columns=["source"])["source"] if "source" in names else None
