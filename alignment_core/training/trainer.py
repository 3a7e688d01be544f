"""The trainer: one loop for every method, over DeepSpeed, with checkpoints that resume exactly.

One object per rank. What a step does follows from (job, step) alone: which rows, how they are cut, the learning rate,
the dropout seed. So a resumed run needs nothing but the weights, the optimiser and the number of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device
from alignment_core.data.turn_end import chat_template_of
from alignment_core.errors import NumericError
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import load_frozen, run_packed
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.batches import batch_of_step, first_rows, steps_per_epoch
from alignment_core.training.checkpoints import described
from alignment_core.training.collectives import agree, sum_over_ranks
from alignment_core.training.learner import Learner, Loss, MetricSums, ModelSource, StepReport, Term
from alignment_core.training.methods.base import BatchMethod, Method
from alignment_core.training.moving_reference import MovingReference
from alignment_core.training.reference import ReferenceLogps
from alignment_core.training.schedule import learning_rate
from alignment_core.training.training_rows import Rows, rows_before, shuffles, training_rows


@dataclass(frozen=True)
class TrainJob:
    """What to train: plain data that travels to every rank. Paths are those of the rank's own machine."""

    method: Method
    model: Model
    reference_logps: Path | None
    """What the stage of this name made of the data, for a method that needs it."""
    train_data: Path
    test_data: Path | None
    training: TrainingConfig
    seed: int
    reference: Model | None = None
    """What a method compares with that has its reference follow the policy (``sync``), as it starts; None: the policy."""
    sync: ReferenceSyncConfig | None = None
    scratch: Path | None = None
    """Folder for rows that are not in memory; None: where temporary files go."""
    dropout: bool = False
    """Whether the model's own dropout is on; that of LoRA adapters always is."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> Trainer:
        """One rank of it."""
        return Trainer(self, resources, device, rank, world)


class Trainer:
    """Trains one job on this rank. Create it on every rank at once; its methods are collective unless they say so."""

    def __init__(self, job: TrainJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job, self.resources, self.device, self.rank, self.world = job, resources, device, rank, world
        self.rows = training_rows(job.train_data, job.method, job.scratch)
        self.shuffles = shuffles(job.train_data)
        self.test_rows = list(training_rows(job.test_data, job.method, job.scratch)) if job.test_data else []
        self.rows_before: dict[str, Rows] = {"train": [], "test": []}
        if isinstance(job.method, BatchMethod):
            self.rows_before["train"] = rows_before(job.train_data, job.method, self.rows, job.scratch)
            if job.test_data and getattr(job.method, "passes_held_out", True):
                self.rows_before["test"] = rows_before(job.test_data, job.method, self.test_rows, job.scratch)
        config = job.training
        planned = steps_per_epoch(len(self.rows), config.batch_size) * config.num_train_epochs
        self.total_steps = min(planned, config.max_steps or planned)
        self.reference: ReferenceLogps | None = None
        if job.reference_logps is not None:
            train = first_rows(self.total_steps * config.batch_size, len(self.rows), job.seed, self.shuffles)
            needed = {"train": train, "test": range(len(self.test_rows))}
            self.reference = ReferenceLogps.read(job.reference_logps, needed)
        seeds = derive_seed(job.seed, "head"), derive_seed(job.seed, "adapters")
        template = chat_template_of(job.train_data.parent)
        source = ModelSource(job.model, job.method.head, *seeds, dropout=job.dropout, chat_template=template)
        self.learner = Learner(source, config, resources, device, rank, world)
        self.engine = self.learner.engine
        self.moving: MovingReference | None = None
        if job.sync is not None:
            dtype, share = torch.bfloat16 if config.bf16 else torch.float32, self.learner.packed.shares
            frozen = load_frozen(job.reference or job.model, job.method.head, dtype, device.torch_device, share)
            self.moving = MovingReference(frozen, self.learner, job.sync.sync_steps, job.sync.mixup_alpha)

    def layout(self) -> dict[str, Any]:
        """What a checkpoint must share with this job."""
        return self.learner.layout()

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Go on from a complete checkpoint, if there is one; say where we stand."""
        if self.moving:
            self.reference = ReferenceLogps({"test": self._held_out_logps(self.moving)})  # before the reference moves
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
        """Take up to ``steps`` optimiser steps, fewer if rank 0's clock says that ``seconds`` are over."""
        report = StepReport()
        started = time.monotonic()
        for _ in range(min(steps, self.total_steps - self.learner.steps)):
            taken = StepReport()
            self._step(taken)
            report.take(taken)
            if agree(time.monotonic() - started > seconds, self.device.torch_device):
                break
        report.seconds = time.monotonic() - started
        return report

    def _step(self, report: StepReport) -> None:
        job, step = self.job, self.learner.steps
        numbers = batch_of_step(step, len(self.rows), job.training.batch_size, job.seed, self.shuffles)
        batch = [self.rows[number] for number in numbers]
        torch.manual_seed(derive_seed(job.seed, "step", step, self.rank))  # dropout, where a model has any
        rate = learning_rate(job.training, step, self.total_steps)
        method = self._method_of("train", batch, step / max(1, self.total_steps - 1))
        try:
            term = Term(batch, self._loss_of("train", method), job.method.normaliser(batch), report)
            self.learner.step([term], rate)
            if self.moving:
                self.moving.after(self.learner.steps)
        except NumericError as error:
            raise self._numeric_error(str(error), numbers) from None

    def _loss_of(self, split: str, method: Method) -> Loss:
        def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return method.loss(output, micro, self._reference_of(split, micro))

        return loss

    def _reference_of(self, split: str, micro: MicroBatch, first: int = 0) -> torch.Tensor | None:
        """What the method compares a micro-batch with, if with anything: [S], the numbers from column ``first`` on."""
        if self.moving and split == "train":
            return self.moving.logps_of(micro)
        return self.reference.of(split, micro, first) if self.reference else None

    def _held_out_logps(self, reference: MovingReference) -> np.ndarray:
        """Log-probabilities of the held-out rows under the reference as it is, in nats: [rows, columns] float32, the columns as
        in :class:`ReferenceLogps`. All held-out losses compare with the same policy, so that they compare over the steps."""
        columns, parts = [], [self.test_rows]
        if isinstance(self.job.method, BatchMethod) and not self.job.method.passes_trained_rows:
            parts.append(list(self.rows_before["test"]))
        for rows in filter(None, parts):
            logps_BS = torch.zeros(len(rows), len(rows[0].sequences), device=self.device.torch_device)
            for micro in self.learner.micro_batches(rows):
                if micro.rows:
                    logps_S = reference.logps_of(micro).float()
                    logps_BS[[row.number for row in micro.rows]] = logps_S.view(len(micro.rows), -1)
            columns.append(sum_over_ranks(logps_BS).cpu().numpy())
        return np.concatenate(columns, axis=1) if columns else np.zeros((0, 0), np.float32)

    def _method_of(self, split: str, rows: Sequence[Row], done: float | None = None) -> Method:
        """The method for a batch, in training after this share of all steps; where its loss depends on all of the batch, after
        the pass without a gradient that it asks for."""
        method = self.job.method
        if not isinstance(method, BatchMethod):
            return method
        before, sums = self.rows_before[split], list[torch.Tensor]()
        first = 0 if method.passes_trained_rows else len(rows[0].sequences)
        for micro in self.learner.micro_batches([before[row.number] for row in rows] if len(before) else []):
            reference = self._reference_of(split, micro, first)
            with torch.no_grad():
                sums.append(method.sums_before(run_packed(self.engine, micro), micro, reference).double())
        return method.of_batch(rows, sum_over_ranks(torch.stack(sums).sum(0)) if sums else None, done)

    def _numeric_error(self, what: str, numbers: Sequence[int]) -> NumericError:
        """Says which step it was and every row of its batch, with the place in the user's data where that is known."""
        sources = _sources(self.job.train_data)
        rows = ", ".join(f"{number} ({sources[number]})" if sources else str(number) for number in numbers)
        return NumericError(
            f"{what} at step {self.learner.steps} of {self.total_steps}; the rows of its batch are {rows}"
        )

    def evaluate(self) -> StepReport:
        """Loss and metrics on the held-out rows, without gradients."""
        report, loss = StepReport(), self._loss_of("test", self._method_of("test", self.test_rows))
        report.normaliser = self.job.method.normaliser(self.test_rows) if self.rank == 0 else 0.0
        sums = MetricSums()
        for micro in self.learner.micro_batches(self.test_rows):
            with torch.no_grad():
                sums.add(loss(run_packed(self.engine, micro), micro)[1])
        report.sums.update(sums.read())
        return report

    def export(self, directory: Path) -> None:
        """Write the trained model as a Hugging Face folder, with LoRA and its adapters in a folder therein (rank 0 writes, all
        ranks take part)."""
        self.learner.export(directory, adapter=directory / ADAPTER)

    def close(self) -> None:
        """Let go of the model's memory."""
        self.learner.close()

    def describe(self) -> dict[str, Any]:
        """What a checkpoint of this step says of itself."""
        self.learner.check_sound()
        return {"step": self.learner.steps, "layout": self.layout()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""
        self.learner.save(folder)
        if self.moving and self.rank == 0:
            self.moving.save(folder, self.learner.steps)


def _sources(path: Path) -> Any:
    """Where the rows of a table were read, if it says so."""
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    return pyarrow.parquet.read_table(path, columns=["source"])["source"] if "source" in names else None
