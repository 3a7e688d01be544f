"""A :class:`PolicyTrainer` on every rank, as the stage calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup
from alignment_core.models.weight_transfer import Bucket, Share
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.learner import StepReport
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import TrainerActors, open_job
from alignment_core.training.resumable import resume, save_progress
from alignment_core.training.step_data import StepData

U = TypeVar("U")


class PolicyRanks:
    """Training on a policy's own samples; each method is that of :class:`PolicyTrainer`, on all ranks."""

    def __init__(self, trainers: TrainerActors, job: RlJob, resources: ResourcesConfig) -> None:
        self.group = open_job(trainers, job, resources)

    def prepare(self, progress: Path) -> dict[str, Any]:
        """Resume from the newest complete checkpoint in ``progress``; where the run stands."""
        return resume(self.group, progress)

    def load(self, batch: StepData) -> None:
        """Give every rank the batch of the next update."""
        self.group.all(PolicyTrainer.load, batch)

    def forward(self, old: bool, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Add the results of forward passes to the batch on every rank; those that are ``wanted``, [K] by name."""
        return self.group.all(PolicyTrainer.forward, old, wanted)[0]

    def update(self, numbers: Mapping[str, np.ndarray], kl_coefficient: float) -> list[dict[str, StepReport]]:
        """All optimiser steps on the batch with further ``numbers``; for each rank, a report for each learner."""
        return self.group.all(PolicyTrainer.update, numbers, kl_coefficient)

    def buckets(self) -> list[Share]:
        """Which of the policy's weights travel together."""
        return self.group.all(PolicyTrainer.buckets)[0]

    def send(
        self, shares: Sequence[Share], to: ActorGroup[U], receive: Callable[[U, Bucket], object], merge: bool = True
    ) -> None:
        """These weights, adapters merged in or left out, from rank 0 to the method ``receive`` of all actors of ``to``."""
        self.group.relay((call(PolicyTrainer.bucket, share, merge) for share in shares), to, receive)

    def send_adapter(self, to: ActorGroup[U], receive: Callable[[U, dict[str, bytes]], object]) -> None:
        """The policy's adapter from rank 0 to the method ``receive`` of all actors of ``to``."""
        self.group.relay([call(PolicyTrainer.adapter)], to, receive)

    def export(self, name: str, directory: Path, adapter: Path | None = None) -> None:
        """Write the ``policy``, its moving ``average`` or the ``critic`` as a Hugging Face folder, with LoRA its adapter."""
        folders = [directory, adapter] if adapter else [directory]
        write(self.group, folders, PolicyTrainer.export, name, directory, adapter)

    def save_progress(self, progress: Path, driver: dict[str, Any], curve: bytes = b"") -> None:
        """Write a checkpoint of this step, with what the driver wants back and the metrics of the steps so far."""
        save_progress(self.group, progress, curve, driver=driver)
