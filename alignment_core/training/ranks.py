"""The trainer ranks: their process group, and the job that they are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from alignment_core.cluster.actor import Call
from alignment_core.cluster.device import Device, compute_together
from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.layout import LearnerRole
from alignment_core.imports import uncollected
from alignment_core.memory import memory_explained
from alignment_core.recipes import ResourcesConfig

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """A job of the ranks: plain data that travels to every rank."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> T_co:
        """Make the object that does the job on one rank; called on every rank at once."""


@dataclass(frozen=True)
class TrainerActors:
    """Actors whose processes are the trainer ranks, all in one process group."""

    group: ActorGroup[Any]
    device: Device
    learners: Callable[[LearnerRole], ActorGroup[Any]]
    """Starts the ranks of a model that has its own, for the same stage; see :mod:`alignment_core.cluster.layout`."""


def open_job(trainers: TrainerActors, job: Job[T], resources: ResourcesConfig) -> ActorGroup[T]:
    """Give every rank the object of a job, in place of the previous job.

    Raises EnvironmentFault if its models do not fit into memory; calls of the object raise OutOfMemory if smaller micro-batches
    may help.
    """
    group: ActorGroup[T] = trainers.group
    shared = {"resources": resources, "device": trainers.device, "world": group.size}
    guard = partial(memory_explained, resources.token_budget)
    group.make(job.open, [{"rank": rank, **shared} for rank in range(group.size)], guard)
    return group


def run_blocks(
    ranks: ActorGroup[T], calls: Iterable[tuple[int, Call[T, R]]], resources: ResourcesConfig
) -> Iterator[tuple[int, list[R]]]:
    """Make each numbered call on an idle rank or, if the ranks compute a model together, on all of them. Yields numbers
    and the results of the ranks that were called."""
    if compute_together(resources, ranks.size):
        for number, requested in calls:
            yield number, ranks.call_all(requested)
    else:
        for number, result in ranks.spread(calls):
            yield number, [result]


def join(
    rank: int, world: int, rendezvous: str, resources: ResourcesConfig, device: Device, on_machine: int | None = None
) -> None:
    """Make this process one of ``world`` ranks of a process group, for as long as it lives. ``on_machine``, by default all, are
    on this machine."""
    # There is no launcher that sets these. Without LOCAL_SIZE, DeepSpeed's CPU accelerator would count NUMA nodes.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(device.local_rank(rank)))
    os.environ.update(LOCAL_SIZE=str(world))
    with uncollected():
        import deepspeed
        import torch
        import transformers
        from transformers import AutoModelForCausalLM  # noqa: F401 (transformers would import it while the first stage waits)
    torch.set_num_threads(device.trainer_threads(resources, device.learners(resources), on_machine or world))
    if (
        device.kind == "cpu"
    ):  # several threads would add up the gradients of a place that is read several times in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # DeepSpeed would compile this operator for 39 s in every process, and it leaks shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        device.backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world,
        auto_mpi_discovery=False,  # a rendezvous by file has no MASTER_ADDR, and DeepSpeed would look for MPI instead
        timeout=timedelta(seconds=resources.wait_timeout_seconds),
    )
