"""The completions of a run's steps as Parquet files, written beside the training; those of large steps by another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.columns import parts
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import FOLDER, keep_images
from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rewards.results import numbers
from alignment_core.rollout.images import digests_of
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.schemas import rollout_schema, write_columns
from alignment_core.rollout.trajectory_writer import TrajectoryWriter
from alignment_core.training.step_data import StepData

if TYPE_CHECKING:
    import pyarrow as pa

SMALL = 1 << 20
"""Steps of fewer tokens, of prompts and completions, are written by this process: another one would take longer to start."""


def step_schema(with_images: bool = False) -> pa.Schema:
    """One row per completion of a step; lists are as long as the completion, and null where a number was not computed.

    ``versions`` is the number of training steps of the policy that sampled each token, ``group`` the prompt's index among
    all that the run has drawn, ``used`` whether the completion was trained on, ``rewards`` the results of the rewards in the
    recipe's order, and ``reward`` their total, null where the completion was not used. Where a reward is missing,
    ``rewards`` holds null and ``failures`` the reason; ``failures`` is null where none is missing. The column ``images`` has
    the digests of files in the data set of the run's prompts, or of observations, which are beside the steps in ``images/``.
    """
    import pyarrow as pa

    floats = pa.list_(pa.float32())
    schema = rollout_schema(with_images)
    schema = schema.set(schema.get_field_index("logps"), pa.field("rollout_logps", floats))
    for name, kind in (
        ("group", pa.int32()),
        ("used", pa.bool_()),
        ("rewards", floats),
        ("failures", pa.list_(pa.string())),
        ("mask", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),
        ("reward", pa.float32()),
        ("old_logps", floats),
        ("reference_logps", floats),
        ("old_values", floats),
        ("advantages", floats),
        ("returns", floats),
    ):
        schema = schema.append(pa.field(name, kind))
    return schema


@dataclass(frozen=True)
class StepTable:
    """The rows of a step before their file's columns are made of them: cheap to make, and to send to another process."""

    columns: dict[str, list[Any]]
    """All columns of the schema. Those of ``numbers`` have only what rows that are not trained on have there."""
    masks: list[np.ndarray]
    """[T] Which tokens are trained, of each row that is; these come first."""
    numbers: dict[str, np.ndarray]
    """[K] Numbers of trained tokens, by name."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], batch: StepData | None, schema: pa.Schema) -> StepTable:
        """See :meth:`Trajectories.write`."""
        columns = {name: [getattr(rollout, name, None) for rollout in rollouts] for name in schema.names}
        columns[IMAGES] = [digests_of({IMAGES: rollout.images}) for rollout in rollouts]
        columns["mask"] = [rollout.loss_mask for rollout in rollouts]
        columns["rollout_logps"] = [rollout.logps for rollout in rollouts]
        columns["rewards"] = [numbers(list(rollout.rewards.values())) for rollout in rollouts]
        if batch is None:
            return cls(columns, [], {})
        masks = [rollout.trained_mask for rollout in rollouts[: len(batch.ends_S)]]
        packed = columns.keys() - {"rollout_logps"}  # which tokens without a loss have, too
        return cls(columns, masks, {name: values for name, values in batch.numbers.items() if name in packed})

    def write(self, schema: pa.Schema, path: Path) -> None:
        """Write the file, whole or not at all."""
        columns = dict(self.columns)
        for name, values in numbers_by_token(self.masks, self.numbers).items():
            columns[name] = [*values, *columns[name][len(values) :]]
        write_columns(columns, schema, path)


class Trajectories:
    """Writes one step at a time, beside the caller: a thread sends it to a process, which starts with the first large one."""

    def __init__(self, folder: Path, config: TrajectoriesConfig, steps: int, with_images: bool = False) -> None:
        """``steps`` of the whole run; ``with_images`` if any of its prompts has some, because all steps have one schema."""
        folder.mkdir(exist_ok=True)
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink()
        self.folder = folder
        self.config = config
        self.steps = steps
        self.schema = step_schema(with_images)
        self._thread = ThreadPoolExecutor(1, "trajectories")
        self._writer: TrajectoryWriter | None = None
        self._writing: Future[None] | None = None

    def keeps(self, step: int) -> bool:
        """Whether the trajectories of a step, from 0, are kept."""
        if self.config.keep == "last":
            return step >= self.steps - self.config.steps
        return self.config.keep == "all" or step % self.config.steps == 0

    def write(self, step: int, rollouts: Sequence[Rollout], batch: StepData | None) -> None:
        """Begin to write a step. Rollouts that are trained on come first, in the order of the batch; without one, none is."""
        self.settle()
        self._writing = self._thread.submit(self._write, step, rollouts, batch)

    def _write(self, step: int, rollouts: Sequence[Rollout], batch: StepData | None) -> None:
        table = StepTable.of(rollouts, batch, self.schema)
        if sum(len(rollout.prompt_ids) + len(rollout.loss_mask) for rollout in rollouts) < SMALL:
            table.write(self.schema, self._file(step))
            return
        self._writer = self._writer or TrajectoryWriter()
        self._writer.call(StepTable.write, table, self.schema, self._file(step))

    def drop(self, step: int) -> None:
        """Delete the file of a step that failed before the run was resumed."""
        self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.parquet"

    def settle(self) -> None:
        """Wait until all is written. Raises OSError if the disk has no room, InfrastructureError if the process died."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def copy_images(self, observed: Path, prompts: Path, target: Path) -> None:
        """Put the images of the steps that are kept into ``target``, except those that the data set ``prompts`` has;
        ``observed`` is the folder with the others."""
        import pyarrow.parquet as pq

        if IMAGES not in self.schema.names:
            return
        for file in self.folder.glob("*.parquet"):
            column = pq.read_table(file, columns=[IMAGES])[IMAGES].to_pylist()
            digests = {digest for images in column for digest in images}
            keep_images(
                (digest for digest in digests if not (prompts / FOLDER / digest).exists()), observed, target / FOLDER
            )

    def close(self) -> None:
        """Finish the current write, and end the thread and its process."""
        self._thread.shutdown()
        if self._writer:
            self._writer.close()


def numbers_by_token(masks: Sequence[np.ndarray], numbers: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Numbers [K] of trained tokens by name and completion: [T] each, 0 at tokens that are not trained. ``masks`` [T] tell
    which ones are."""
    mask_T = np.concatenate(masks) if masks else np.zeros(0, bool)
    ends_S = np.cumsum([len(mask) for mask in masks])
    columns = {}
    for name, values_K in numbers.items():
        values_T = np.zeros(len(mask_T), np.float32)
        values_T[mask_T] = values_K
        columns[name] = parts(values_T, ends_S)
    return columns
