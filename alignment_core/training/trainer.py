"""The trainer: one loop for every method, over DeepSpeed, with checkpoints that resume exactly.

One object per rank. What a step does follows from (job, step) alone: which rows, how they are cut, the learning rate,
the dropout seed. So a resumed run needs nothing but the weights, the optimiser and the number of the next step.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from alignment_core.artifacts.faults import check_room
from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device
from alignment_core.errors import EnvironmentFault, NumericError
from alignment_core.models.packed import PackedModel, load_model, run_packed
from alignment_core.models.saving import save_checkpoint
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.batches import MicroBatch, Row, batch_of_step, cut, pack, steps_per_epoch
from alignment_core.training.methods.base import Method
from alignment_core.training.ranks import agree, sum_over_ranks
from alignment_core.training.reference import ReferenceLogps
from alignment_core.training.schedule import learning_rate

LEAST_BYTES_PER_PARAMETER = 12
"""Of a progress checkpoint: fp32 (master) weights and AdamW's two moments, whatever the ZeRO stage and precision."""


@dataclass(frozen=True)
class TrainJob:
    """What to train: plain data that travels to every rank. Paths are local folders of verified artifacts."""

    method: Method
    model: str
    reference: str | None
    train_data: str
    test_data: str | None
    training: TrainingConfig
    seed: int
    trust_remote_code: bool = False


@dataclass
class StepReport:
    """Sums over the steps of one call on one rank; the driver adds ranks and divides."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    normaliser: float = 0.0
    tokens: int = 0
    steps: int = 0
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    seconds: float = 0.0


class Trainer:
    """Trains one job on this rank. Create it on every rank at once; its methods are collective unless they say so."""

    def __init__(self, job: TrainJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job, self.resources, self.device, self.rank, self.world = job, resources, device, rank, world
        self.zero_stage = resources.zero_stage if resources.zero_stage is not None else 0 if world == 1 else 2
        self.rows = job.method.rows(_read(job.train_data))
        self.test_rows = job.method.rows(_read(job.test_data)) if job.test_data else []
        config = job.training
        planned = steps_per_epoch(len(self.rows), config.batch_size) * config.num_train_epochs
        self.total_steps = min(planned, config.max_steps or planned)
        self.step = 0
        self.sound = True  # false from a step's beginning to its end: nobody may save what a failed step left behind
        self.grad_norm = 0.0
        self.reference: ReferenceLogps | None = None
        self.frozen: Any = None  # the reference model, while it is needed
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        model = load_model(job.model, job.method.head, dtype, derive_seed(job.seed, "head"), job.trust_remote_code)
        if resources.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.packed = PackedModel(model, job.method.head)
        self.engine = self._engine()

    def _engine(self) -> Any:
        import deepspeed

        config, resources = self.job.training, self.resources
        optimizer = self._optimizer()
        clipping = config.max_grad_norm
        if self.zero_stage == 0 and not config.bf16:  # DeepSpeed would clip and keep the norm to itself
            optimizer.register_step_pre_hook(self._clip)
            clipping = 0.0
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # `step` is the boundary: packs per step vary
            "gradient_clipping": clipping,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": config.bf16},
            "zero_optimization": {"stage": self.zero_stage, "overlap_comm": False},
        }
        if resources.offload_optimizer:
            settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine, *_ = deepspeed.initialize(model=self.packed, optimizer=optimizer, config=settings)
        return engine

    def _clip(self, *_: Any) -> None:
        """Called by the optimiser before it steps, when the gradients of all ranks are added up."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.packed.parameters() if p.grad is not None])
        self.grad_norm = float(norm)
        if self.grad_norm > (most := self.job.training.max_grad_norm) > 0:
            torch.nn.utils.clip_grads_with_norm_(self.packed.parameters(), most, norm)

    def _optimizer(self) -> Any:
        config = self.job.training
        decayed = [p for _, p in self.packed.named_parameters() if p.dim() > 1]
        plain = [p for _, p in self.packed.named_parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        options: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
        }
        groups = [group for group in groups if group["params"]]
        if self.resources.offload_optimizer:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return torch.optim.AdamW(groups, **options)

    # -- training ------------------------------------------------------------------------------------------------

    def prepare(self, progress: str) -> dict[str, Any]:
        """Resume from the newest complete checkpoint in ``progress``; say where we stand."""
        newest = newest_progress(Path(progress), self._layout())
        if self.job.method.needs_reference:
            splits, budget = {"train": self.rows, "test": self.test_rows}, self.resources.max_tokens_per_microbatch
            self.reference = ReferenceLogps(splits, Path(progress), self.rank, self.world, budget)
            if self.reference.left:
                newest = None  # the policy itself may be the reference, and that one has trained
        if newest is not None:
            self._restore(newest)
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "rows": len(self.rows),
            "parameters": self._parameters(),
        }

    def _parameters(self) -> int:
        """Parameters of the whole model, also where this rank holds a part of them."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.packed.parameters())

    def refer(self, seconds: float) -> tuple[int, int]:
        """Forward passes of the reference for about ``seconds``; packs that are done, of all.

        Without a reference model of its own the policy before its first step is the reference.
        """
        if self.reference is None:
            return 0, 0
        if self.reference.left:
            self.engine.eval()
            if self.frozen is None:
                self.frozen = self._reference_model()
            self.reference.compute(self.frozen, self.device.torch_device, seconds)
        if not self.reference.left:
            self.frozen = None
        return self.reference.total - len(self.reference.left), self.reference.total

    def _reference_model(self) -> Any:
        if self.job.reference is None:
            return self.engine
        dtype = torch.bfloat16 if self.job.training.bf16 else torch.float32
        model = load_model(self.job.reference, "lm", dtype, trust_remote_code=self.job.trust_remote_code)
        return PackedModel(model, "lm").to(self.device.torch_device).eval()

    def train(self, steps: int, seconds: float) -> StepReport:
        """Take up to ``steps`` optimiser steps, fewer if rank 0's clock says that ``seconds`` are over."""
        report = StepReport()
        started = time.monotonic()
        self.engine.train()
        for _ in range(min(steps, self.total_steps - self.step)):
            self._step(report)
            if agree(time.monotonic() - started > seconds, self.device.torch_device):
                break
        report.seconds = time.monotonic() - started
        return report

    def _step(self, report: StepReport) -> None:
        job = self.job
        self.sound = False
        numbers = batch_of_step(self.step, len(self.rows), job.training.batch_size, job.seed)
        batch = [self.rows[number] for number in numbers]
        normaliser = job.method.normaliser(batch)
        rate = learning_rate(job.training, self.step, self.total_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(derive_seed(job.seed, "step", self.step, self.rank))  # dropout, where a model has any
        step_loss = 0.0
        for rows in cut(batch, self.world, self.resources.max_tokens_per_microbatch)[self.rank]:
            micro = pack(rows, self.device.torch_device)
            loss, metrics = job.method.loss(run_packed(self.engine, micro), micro, self._reference_of("train", micro))
            # DeepSpeed averages gradients over ranks; the loss of a batch is a sum over them.
            self.engine.backward(loss * (self.world / normaliser))
            for name, value in metrics.items():
                report.sums[name] += float(value)
            step_loss += float(metrics["loss"])
            report.tokens += sum(row.tokens for row in rows)
        summed = sum_over_ranks(torch.tensor([step_loss], dtype=torch.float64, device=self.device.torch_device))
        loss_of_batch = float(summed) / normaliser
        if not math.isfinite(loss_of_batch):
            raise self._numeric_error(f"the loss is {loss_of_batch}", numbers)
        if (most := job.training.max_loss) is not None and loss_of_batch > most:
            raise self._numeric_error(f"the loss is {loss_of_batch:.4g}, above training.max_loss {most:g},", numbers)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()  # of all ranks; infinite if NaN; none where this trainer clips
        report.grad_norm = self.grad_norm if norm is None else float(norm)
        if not math.isfinite(report.grad_norm):
            raise self._numeric_error("the gradient is not finite", numbers)
        report.normaliser += normaliser if self.rank == 0 else 0.0
        report.learning_rate = rate
        report.steps += 1
        self.step += 1
        self.sound = True

    def _numeric_error(self, what: str, numbers: Sequence[int]) -> NumericError:
        """Says which step it was and every row of its batch, with the place in the user's data where that is known."""
        table = _read(self.job.train_data)
        sources = table.column("source").to_pylist() if "source" in table.column_names else {}
        rows = ", ".join(f"{number} ({sources[number]})" if sources else str(number) for number in numbers)
        return NumericError(f"{what} at step {self.step} of {self.total_steps}; the rows of its batch are {rows}")

    def evaluate(self) -> StepReport:
        """Loss and metrics on the held-out rows, without gradients."""
        report = StepReport(normaliser=self.job.method.normaliser(self.test_rows) if self.rank == 0 else 0.0)
        for micro in self._micro_batches(self.test_rows):
            with torch.no_grad():
                _, metrics = self.job.method.loss(
                    run_packed(self.engine, micro), micro, self._reference_of("test", micro)
                )
            for name, value in metrics.items():
                report.sums[name] += float(value)
        return report

    def export(self, directory: str) -> None:
        """Write the trained model as a Hugging Face folder (rank 0 writes, all ranks take part)."""
        self._check_sound()
        state = None
        if self.zero_stage == 3:
            state = self.engine._zero3_consolidated_16bit_state_dict()
        if self.rank == 0:
            if state is not None:
                state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
            save_checkpoint(self.packed.model, Path(self.job.model), Path(directory), state)
        torch.distributed.barrier()

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """This rank's packs of ``rows`` for a forward pass; every rank gets the same number."""
        self.engine.eval()
        packs = cut(rows, self.world, self.resources.max_tokens_per_microbatch)[self.rank] if rows else []
        return [pack(part, self.device.torch_device) for part in packs]

    def _reference_of(self, split: str, micro: MicroBatch) -> torch.Tensor | None:
        return self.reference.of(split, micro) if self.reference else None

    # -- progress ------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        """What a progress checkpoint must share with the trainer that resumes from it."""
        return {
            "world": self.world,
            "zero_stage": self.zero_stage,
            "offload_optimizer": self.resources.offload_optimizer,
        }

    def save_progress(self, directory: str) -> None:
        """Write a checkpoint of this step below ``directory``; it counts once its ``complete.json`` is there.

        When it returns, all of it is on the disk, so that older ones may go. Raises EnvironmentFault where the disk has no
        room for it.
        """
        self._check_sound()
        target = Path(directory) / f"step-{self.step:08d}"
        if newest_progress(Path(directory), self._layout()) == target:
            return  # the one that this trainer resumed from; all ranks see the same
        if self.rank == 0:
            shutil.rmtree(target, ignore_errors=True)  # of another layout, or of a run that was killed while it wrote
            target.parent.mkdir(parents=True, exist_ok=True)
            self._check_room(target)
        torch.distributed.barrier()
        try:
            self.engine.save_checkpoint(str(target), tag="state", save_latest=False)
        except RuntimeError:  # torch does not say why it could not write
            self._check_room(target)
            raise
        torch.distributed.barrier()
        if self.rank == 0:
            _sync_tree(target)
            (target / "complete.json").write_text(json.dumps({"step": self.step, "layout": self._layout()}))
            _sync_tree(target)
            _sync(target.parent)  # its own name there

    def _check_room(self, target: Path) -> None:
        size = LEAST_BYTES_PER_PARAMETER * self._parameters()
        try:
            check_room(target.parent, size, f"the checkpoint of step {self.step}")
        except EnvironmentFault:
            shutil.rmtree(target, ignore_errors=True)  # half of one is of no use and takes the last room
            raise

    def _check_sound(self) -> None:
        if not self.sound:
            raise NumericError(f"step {self.step} failed half-way: what it left of the weights is not saved")

    def _restore(self, checkpoint: Path) -> None:
        loaded, _ = self.engine.load_checkpoint(str(checkpoint), tag="state")
        if loaded is None:
            raise NumericError(f"DeepSpeed could not read the progress checkpoint {checkpoint.name}")
        self.step = json.loads((checkpoint / "complete.json").read_text())["step"]


def newest_progress(directory: Path, layout: dict[str, Any] | None = None) -> Path | None:
    """The newest complete checkpoint in ``directory`` (of this layout, if one is given)."""
    for checkpoint in sorted(directory.glob("step-*"), reverse=True):
        try:
            described = json.loads((checkpoint / "complete.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if layout is None or described["layout"] == layout:
            return checkpoint
    return None


def _sync_tree(directory: Path) -> None:
    """Force the files below ``directory`` to the disk, then the folder entries."""
    for path in [*sorted(directory.rglob("*"), reverse=True), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    """Force one file, or the entries of one folder, to the disk."""
    import os

    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)
