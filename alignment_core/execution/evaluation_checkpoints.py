"""Looks at the held-out rows while a stage trains: which checkpoint is the best so far, and whether to stop early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.files import write_whole
from alignment_core.training.checkpoints import link_tree, put_in_place

if TYPE_CHECKING:
    from alignment_core.recipes.sections.training import TrainingConfig


class EvaluationCheckpoints:
    """Each look is a file of the progress, and the best checkpoint a folder beside them, whole or absent.

    A run that goes on from an earlier step forgets the looks after it, and takes them again. So a folder goes only when a
    checkpoint of the progress was written after a better one.
    """

    def __init__(self, progress: Path, training: TrainingConfig, step: int, total: int, before: bool = False) -> None:
        """Of a stage that is at ``step`` of ``total``; ``before`` asks for a look before the first one, which is none of the
        candidates for the best."""
        self._progress, self._total, self._before = progress, total, before
        self._every, self._name = training.eval_steps, training.metric_for_best_model
        self._patience = training.early_stopping_patience
        self.metrics: dict[int, dict[str, float]] = {}
        """The metrics of the held-out rows by step, in their order."""
        for file in sorted(progress.glob("look-*.json")):
            if (number := int(file.stem.removeprefix("look-"))) <= step:
                self.metrics[number] = json.loads(file.read_text())
            else:
                file.unlink()

    def is_due(self, step: int) -> bool:
        """Whether to look after so many steps."""
        if step in self.metrics:
            return False
        if step == 0:
            return self._before
        return self._every is not None and (step % self._every == 0 or step == self._total)

    def next_after(self, step: int) -> int:
        """The step up to which nothing is due."""
        return min(self._total, step - step % self._every + self._every) if self._every else self._total

    def add(self, step: int, metrics: dict[str, float], export: Callable[[Path], None]) -> None:
        """Note what was measured after so many steps; the checkpoint stays if it is the best so far.

        Raises UserError if the metric that decides it is not there.
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
        """The step of the best look, the first of equals; None if there was none, or nothing says which is best."""
        if self._name is None:
            return None
        sign = 1 if higher_is_better(self._name) else -1
        values = {step: sign * metrics[self._name] for step, metrics in self.metrics.items() if step}
        values = {step: value for step, value in values.items() if value == value}  # a number
        return max(values, key=values.__getitem__, default=None)

    @property
    def stop(self) -> bool:
        """Whether so many looks in a row were no better that training ends."""
        if self._patience is None or self.best is None:
            return False
        return list(self.metrics)[::-1].index(self.best) >= self._patience

    def checkpointed(self) -> None:
        """A checkpoint of the progress was written: what is not the best now is never asked for again."""
        best = self._folder(self.best) if self.best is not None else None
        for folder in self._progress.glob("best-*"):
            if folder != best:
                shutil.rmtree(folder)

    def link_best(self, folder: Path) -> None:
        """Make the best checkpoint the content of a folder."""
        assert self.best is not None
        link_tree(self._folder(self.best), folder)

    def _folder(self, step: int) -> Path:
        return self._progress / f"best-{step:08d}"
