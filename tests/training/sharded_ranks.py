"""Processes of ZeRO stage 3: the memory in which they load a model, and their losses; started by test_sharded.py."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import ON_A_CPU, Device
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training import engine
from alignment_core.training.forward import ForwardJob
from alignment_core.training.frozen import FrozenModel
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.ranks import join
from alignment_core.training.step_report import StepReport

DEVICE = Device("cpu", 2)


def run(world: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(rank, world, *arguments)`` of all ranks; they are written to ``folder`` as JSON."""
    variables = {**ON_A_CPU, "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, variables):
        torch.multiprocessing.spawn(_work, (world, folder, function, arguments), nprocs=world)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _work(rank: int, world: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    join(rank, world, f"file://{folder / 'rendezvous'}", resources_of(world), DEVICE)
    (folder / f"{rank}.json").write_text(json.dumps(function(rank, world, *arguments)))


def resources_of(world: int, **more: Any) -> ResourcesConfig:
    return ResourcesConfig(trainers=world, zero_stage=3, threads=1, **more)


def model_at(path: str) -> Model:
    return Model(Path(path), Reference("model", "0" * 64))


def _anonymous() -> int:
    """Bytes of this process that are not pages of files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class _Peak(Thread):
    """The most anonymous memory since the start of the thread, in bytes beyond that at its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        self.before = _anonymous()
        self.most = 0
        self.start()

    def run(self) -> None:
        while True:
            self.most = max(self.most, _anonymous() - self.before)
            time.sleep(0.002)


def peak_of_learner(rank: int, world: int, path: str, bf16: bool) -> int:
    """The most memory until a model that will be trained is in parts; DeepSpeed then adds its optimiser."""
    reached: list[int] = []
    shard = engine.shard

    def watched(*of: Any) -> None:
        shard(*of)
        reached.append(peak.most)

    peak = _Peak()
    with patch.object(engine, "shard", watched):
        Learner(ModelSource(model_at(path), "lm"), TrainingConfig(bf16=bf16), resources_of(world), DEVICE, rank, world)
    return reached[0]


def peak_of_frozen(rank: int, world: int, path: str, bf16: bool) -> int:
    """The most memory until a model is ready for forward passes."""
    peak = _Peak()
    FrozenModel(
        model_at(path), "lm", torch.bfloat16 if bf16 else torch.float32, resources_of(world), DEVICE, rank, world
    )
    return peak.most


def values(rank: int, world: int, path: str, bf16: bool, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """The summed log-probabilities of completions by a frozen model that is in parts from the start. Neither it nor the model
    that it wraps may be moved as a whole, which a model on each rank is."""
    job = ForwardJob(model_at(path), "lm", bf16)
    resources = resources_of(world)
    with (
        patch.object(PackedModel, "to", side_effect=AssertionError("the whole model is moved")),
        patch.object(PreTrainedModel, "to", side_effect=AssertionError("the whole model is moved")) as move,
    ):
        forward = job.open(resources, DEVICE, rank, world)
        summed = torch.from_numpy(forward.run(pairs))
        forward.close()
        try:
            job.open(resources.model_copy(update={"zero_stage": 0}), DEVICE, rank, world)
        except AssertionError:
            assert move.call_count == 1
        else:
            raise AssertionError("a move would not be noticed")
    torch.distributed.all_reduce(summed)  # each row is computed on one rank
    result: list[float] = summed.tolist()
    return result


def losses(rank: int, world: int, path: str, training: dict[str, Any], head: Any) -> list[Any]:
    """The losses and norms of gradients of three steps: of a model that is in parts from the start, whose whole may not be
    moved, and of DeepSpeed's own way with the whole model on each rank. Last the types of the first one's buffers."""
    load = Model.load
    with patch.object(PackedModel, "to", side_effect=AssertionError("the whole model is moved")):
        ours, buffers = _losses(rank, world, path, training, head)
    with (
        patch.object(engine, "shard"),
        patch.object(Model, "load", lambda model, head, dtype, seed, *_: load(model, head, dtype, seed)),
    ):
        whole, _ = _losses(rank, world, path, training, head)
    return [ours, whole, buffers]


def _losses(
    rank: int, world: int, path: str, training: dict[str, Any], head: Any
) -> tuple[list[list[float]], list[str]]:
    source = ModelSource(model_at(path), head, head_seed=5, adapter_seed=6)
    learner = Learner(source, TrainingConfig(**training), resources_of(world), DEVICE, rank, world)
    generator = torch.Generator().manual_seed(3)
    reports = []
    for _ in range(3):
        ids = torch.randint(0, 250, (4, 30), generator=generator).numpy()
        rows = [Row(number, (TokenSequence.of_prompt_and_completion(of[:9], of[9:]),)) for number, of in enumerate(ids)]
        report = StepReport()
        learner.step([Term(rows, _loss, 50.0, report)], 1e-2)
        summed = torch.tensor(report.sums["loss"], dtype=torch.float64)
        torch.distributed.all_reduce(summed)
        reports.append([float(summed), report.grad_norm])
    buffers = {str(buffer.dtype) for buffer in learner.packed.buffers() if buffer.is_floating_point()}
    learner.close()
    return reports, sorted(buffers)


def _loss(output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -output.sum() if micro.rows else 0.0 * output.sum()
    return loss, {"loss": loss.detach()}
