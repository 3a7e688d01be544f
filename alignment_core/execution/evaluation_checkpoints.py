"""Evaluations on held-out rows while a stage trains: the best checkpoint so far, and early stopping."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.files import write_whole
from alignment_core.training.checkpoints import link_model, put_in_place

if TYPE_CHECKING:
    from alignment_core.models.model_ref import Model
    from alignment_core.recipes.sections.training import TrainingConfig


class EvaluationCheckpoints:
    """Each evaluation is a file of the progress, and the best checkpoint is a folder beside them, complete or absent.

    A run that resumes from an earlier step forgets later evaluations and repeats them. So the folder of a checkpoint is deleted
    only after a checkpoint of the progress was written that knows a better one.
    """

    def __init__(self, progress: Path, training: TrainingConfig, step: int, total: int, on_start: bool = False) -> None:
        """For a stage that is at ``step`` of ``total``. With ``on_start`` there is an evaluation before the first step, which
        is no candidate for the best."""
        self._progress = progress
        self._total = total
        self._on_start = on_start
        self._every = training.eval_steps
        self._name = training.metric_for_best_model
        self._patience = training.early_stopping_patience
        self.metrics: dict[int, dict[str, float]] = {}
        """Metrics of the held-out rows by step, in the order of steps."""
        for file in sorted(progress.glob("look-*.json")):
            if (number := int(file.stem.removeprefix("look-"))) <= step:
                self.metrics[number] = json.loads(file.read_text())
            else:
                file.unlink()

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step`` steps."""
        if step in self.metrics:
            return False
        if step == 0:
            return self._on_start
        return self._every is not None and (step % self._every == 0 or step == self._total)

    def next_after(self, step: int) -> int:
        """The next step at which an evaluation is due, or the last step."""
        return min(self._total, step - step % self._every + self._every) if self._every else self._total

    def add(self, step: int, metrics: dict[str, float], export: Callable[[Path], None]) -> None:
        """Add the metrics after ``step`` steps; export the checkpoint if it is the best so far.

        Raises UserError if the metric for the best checkpoint is missing.
        """
        if self._name is not None and self._name not in metrics:
            raise UserError(
                f"training.metric_for_best_model: {self._name!r} is not measured on held-out rows; there are "
                f"{', '.join(sorted(metrics))}"
            )
        before = self.best
        self.metrics[step] = metrics
        if self.best != before:
            partial = self._folder(step).with_suffix(".partial")
            export(partial)
            put_in_place(partial, self._folder(step))
        write_whole(self._progress / f"look-{step:08d}.json", lambda file: file.write(json.dumps(metrics).encode()))

    @property
    def best(self) -> int | None:
        """The step of the best evaluation, the first of equals; None without evaluations or without a metric for the best."""
        if self._name is None:
            return None
        sign = 1 if higher_is_better(self._name) else -1
        values = {step: sign * metrics[self._name] for step, metrics in self.metrics.items() if step}
        values = {step: value for step, value in values.items() if value == value}  # without NaN
        return max(values, key=values.__getitem__, default=None)

    @property
    def stop(self) -> bool:
        """Whether patience is exhausted."""
        if self._patience is None or self.best is None:
            return False
        return list(self.metrics)[::-1].index(self.best) >= self._patience

    def checkpointed(self) -> None:
        """Delete checkpoints that are no longer the best; call it after a checkpoint of the progress was written."""
        best = self._folder(self.best) if self.best is not None else None
        for folder in self._progress.glob("best-*"):
            if folder != best:
                shutil.rmtree(folder)

    def link_best(self, folder: Path, trained: Model) -> None:
        """Make the best checkpoint of ``trained`` the content of a folder."""
        assert self.best is not None
        link_model(self._folder(self.best), folder, trained)

    def _folder(self, step: int) -> Path:
        return self._progress / f"best-{step:08d}"
