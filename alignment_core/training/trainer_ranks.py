"""A :class:`Trainer` on every rank, as the stage calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment_core.training.learner import StepReport
from alignment_core.training.resumable import ResumableJob
from alignment_core.training.trainer import Trainer


class TrainerRanks(ResumableJob[Trainer]):
    """Training on fixed data; each method is that of :class:`Trainer`, on all ranks."""

    def prepare(self, progress: Path) -> dict[str, Any]:
        """Resume from the newest complete checkpoint in ``progress``; where the job stands."""
        return self._resume(progress, Trainer.layout, Trainer.prepare)

    def train(self, steps: int, seconds: float) -> list[StepReport]:
        """Up to ``steps`` optimiser steps for about ``seconds``; a report for each rank."""
        return self._all(Trainer.train, steps, seconds)

    def evaluate(self) -> list[StepReport]:
        """Loss and metrics on the held-out rows; a report for each rank."""
        return self._all(Trainer.evaluate)

    def export(self, directory: Path) -> None:
        """Write the trained model as a Hugging Face folder."""
        self._write([directory], Trainer.export, directory)

    def save_progress(self, progress: Path, curve: bytes = b"") -> None:
        """Write a checkpoint of this step, with the metrics of the steps so far."""
        self._checkpoint(progress, curve, Trainer.describe, Trainer.save)
