"""The completions of a run's steps as files, written beside the training."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rollout.advantages import Samples, put_numbers, step_schema
from alignment_core.rollout.schemas import write_table
from alignment_core.training.step_data import StepData


class Trajectories:
    """Writes one step at a time, in a thread of its own."""

    def __init__(self, folder: Path, config: TrajectoriesConfig, steps: int) -> None:
        """``steps`` of the whole run."""
        folder.mkdir(exist_ok=True)
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink()
        self.folder, self.config, self.steps = folder, config, steps
        self._thread = ThreadPoolExecutor(1, "trajectories")
        self._writing: Future[None] | None = None

    def keeps(self, step: int) -> bool:
        """Whether those of a step, from 0, stay."""
        if self.config.keep == "last":
            return step >= self.steps - self.config.steps
        return self.config.keep == "all" or step % self.config.steps == 0

    def write(self, step: int, samples: Samples, data: StepData) -> None:
        """Begin to write a step: its samples; those that are trained on come first and have their numbers in the data."""
        self.settle()
        self._writing = self._thread.submit(self._write, step, samples, data)

    def _write(self, step: int, samples: Samples, data: StepData) -> None:
        put_numbers(samples[: len(data.ends_S)], data)
        write_table(samples, step_schema(), self.folder / f"step-{step:06d}.parquet")

    def drop(self, step: int) -> None:
        """Of a run that goes on: what was written of a step that failed."""
        (self.folder / f"step-{step:06d}.parquet").unlink(missing_ok=True)

    def settle(self) -> None:
        """Wait until all is written. Raises OSError where the disk has no room."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """End the thread; what it is at is written."""
        self._thread.shutdown()
