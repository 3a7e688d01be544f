"""Checkpoints of a job on trainer ranks, which lie on the machine of the stage: it decides which of them count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol, TypeVar

from alignment_core.cluster.group import ActorGroup
from alignment_core.training.checkpoints import CURVE, complete, folder_of, newest_progress
from alignment_core.training.rank_folders import bring, write


class Resumable(Protocol):
    """The object that each rank holds of a job with checkpoints."""

    def layout(self) -> dict[str, Any]:
        """Properties that a checkpoint must share with this job."""

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Continue from a complete checkpoint, if there is one; returns the progress of the job."""

    def describe(self) -> dict[str, Any]:
        """The description of a checkpoint of this step, with its ``step`` and ``layout``."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""


S = TypeVar("S", bound=Resumable)


def resume(ranks: ActorGroup[S], progress: Path) -> dict[str, Any]:
    """Continue from the newest checkpoint in ``progress`` that is complete and of this layout; returns the job's progress."""
    newest = newest_progress(progress, ranks.all(Resumable.layout)[0])
    if newest is not None:
        bring(ranks, newest)
    return ranks.all(Resumable.prepare, newest)[0]


def save_progress(ranks: ActorGroup[S], progress: Path, curve: bytes = b"", **more: Any) -> None:
    """Write a checkpoint of this step below ``progress``, with the metrics of the steps so far; ``more`` is added to its
    description. It counts once it is complete.

    When it returns, all of it is on this machine's disk, so that older ones may be removed. Raises EnvironmentFault if a
    disk has no room for it.
    """
    description = ranks.all(Resumable.describe)[0]
    folder = folder_of(progress, description["step"])
    if newest_progress(progress, description["layout"]) == folder:
        return  # the one that this run resumed from
    shutil.rmtree(folder, ignore_errors=True)  # of another layout, or of a run that was killed while it wrote
    write(ranks, [folder], Resumable.save, folder)
    if curve:
        (folder / CURVE).write_bytes(curve)
    complete(folder, {**description, **more})
