"""Models that a stage keeps as outputs while it trains, every ``save_steps`` steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.execution.base import StageContext
from alignment_core.training.checkpoints import link_model, put_in_place

if TYPE_CHECKING:
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes.sections.training import TrainingConfig

PREFIX = "checkpoint-"
CHECKPOINTS = f"{PREFIX}*"
"""The outputs of a stage with such models: ``checkpoint-40`` is the model after 40 steps."""


class IntermediateCheckpoints:
    """Each is a folder of the progress until the stage ends, complete or absent."""

    def __init__(self, progress: Path, training: TrainingConfig, step: int, total: int) -> None:
        """For a stage that is at ``step`` of ``total``: what a killed attempt kept of later steps is made again."""
        self._progress = progress
        self._every = training.save_steps
        self._limit = training.save_total_limit
        self._total = total
        for number, folder in self._kept().items():
            if number > step:
                shutil.rmtree(folder)

    def is_due(self, step: int) -> bool:
        """Whether to keep the model after ``step`` steps. That of the last step is the default output anyway."""
        due = self._every is not None and 0 < step < self._total and step % self._every == 0
        return due and not self._folder(step).exists()

    def next_after(self, step: int) -> int:
        """The next step after which a model is kept, or the last step."""
        return min(self._total, step - step % self._every + self._every) if self._every else self._total

    def add(self, step: int, export: Callable[[Path], None]) -> None:
        """Keep the model after ``step`` steps, and delete the oldest ones beyond the limit."""
        partial = self._folder(step).with_suffix(".partial")
        export(partial)
        put_in_place(partial, self._folder(step))
        for folder in list(self._kept().values())[: -self._limit] if self._limit else ():
            shutil.rmtree(folder)

    def link(self, context: StageContext, trained: Model) -> None:
        """Make the models outputs of the stage, which made them of ``trained``."""
        for step, folder in self._kept().items():
            link_model(folder, context.add_output(f"{PREFIX}{step}"), trained)

    def _folder(self, step: int) -> Path:
        return self._progress / f"{PREFIX}{step:08d}"

    def _kept(self) -> dict[int, Path]:
        """The complete folders by step, the oldest first."""
        folders = sorted(folder for folder in self._progress.glob(CHECKPOINTS) if not folder.suffix)
        return {int(folder.name.removeprefix(PREFIX)): folder for folder in folders}
