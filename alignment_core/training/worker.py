"""A trainer rank as an actor holds it: the process group, then one job after the other, training or forward only."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from alignment_core.artifacts import FileEntry, portable_paths
from alignment_core.cluster.device import Device
from alignment_core.cluster.group import Call
from alignment_core.imports import uncollected
from alignment_core.memory import memory_explained
from alignment_core.recipes import ResourcesConfig

J_co = TypeVar("J_co", covariant=True)


class Job(Protocol[J_co]):
    """What ranks are to do: plain data that travels to every rank."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> J_co:
        """What one rank of it works with, made on every rank at once."""


class TrainWorker:
    """Joins the process group when it is made and stays for many jobs."""

    def __init__(self, rank: int, world: int, rendezvous: str, resources: ResourcesConfig, device: Device) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(device.local_rank(rank)))
        os.environ.update(LOCAL_SIZE=str(world))
        with uncollected():
            import deepspeed
            import torch
            import transformers
            from transformers import AutoModelForCausalLM  # noqa: F401 (imported on first use, and so while a stage waits)
        torch.set_num_threads(resources.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 39 s and leaks shared memory
        deepspeed.init_distributed(
            device.backend,
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            auto_mpi_discovery=False,
            timeout=timedelta(seconds=resources.wait_timeout_seconds),
        )
        self.rank, self.world, self.resources, self.device = rank, world, resources, device
        self.job: Any = None
        self._settled = False
        self.tokens = resources.max_tokens_per_microbatch

    def open(self, job: Job[Any], resources: ResourcesConfig) -> None:
        """Open a job in place of the one before. Raises OutOfMemory where smaller micro-batches may help."""
        self.close()
        self.tokens = resources.max_tokens_per_microbatch
        with memory_explained(self.tokens):
            self.job = job.open(resources, self.device, self.rank, self.world)

    def do(self, asked: Call[Any, Any]) -> Any:
        """Make a call of the open job. Raises OutOfMemory where smaller micro-batches may help."""
        with memory_explained(self.tokens):
            return asked.of(self.job)

    def send(self, folder: Path, home: str) -> tuple[FileEntry, ...] | None:
        """See :func:`alignment_core.artifacts.portable_paths.send`."""
        return portable_paths.send(folder, home)

    def receive(self, folder: Path, entries: Sequence[FileEntry], home: str) -> None:
        """See :func:`alignment_core.artifacts.portable_paths.receive`."""
        portable_paths.receive(folder, entries, home=home)

    def clear(self, folder: Path, home: str) -> None:
        """See :func:`alignment_core.artifacts.portable_paths.clear`."""
        portable_paths.clear(folder, home)

    def close(self) -> None:
        """Let go of the open job and its memory."""
        if hasattr(self.job, "close"):
            self.job.close()
        worked, self.job = self.job is not None, None
        gc.collect()
        if worked and not self._settled:
            gc.freeze()  # what the first job imported: to look through it each time takes half a second
            self._settled = True
        if self.device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()  # the engines share this GPU
