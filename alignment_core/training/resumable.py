"""What ranks write into folders of the stage, and go on from, on whichever machines they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from alignment_core.artifacts.portable_paths import home_id, receive
from alignment_core.cluster.group import call
from alignment_core.training.checkpoints import CURVE, complete, folder_of, newest_progress
from alignment_core.training.trainers import OpenJob
from alignment_core.training.worker import TrainWorker

J = TypeVar("J")
R = TypeVar("R")
P = ParamSpec("P")


class ResumableJob(OpenJob[J]):
    """A job whose checkpoints lie on the machine of the stage, which says which of them count."""

    def _write(
        self, folders: Sequence[Path], method: Callable[Concatenate[J, P], R], /, *arguments: P.args, **named: P.kwargs
    ) -> list[R]:
        """Call the method, which writes into these folders, on every rank; what ranks on other machines write comes here."""
        for rank in self.group.elsewhere:
            for folder in folders:
                self.group.one(rank, call(TrainWorker.clear, folder, home_id()), self.timeout)
        results = self._all(method, *arguments, **named)
        for rank in self.group.elsewhere:
            for folder in folders:
                sent = self.group.one(rank, call(TrainWorker.send, folder, home_id()), self.timeout)
                receive(folder, sent or ())
        return results

    def _resume(
        self, progress: Path, layout: Callable[[J], dict[str, Any]], prepare: Callable[[J, Path | None], dict[str, Any]]
    ) -> dict[str, Any]:
        """Have all ranks go on from the newest checkpoint in ``progress`` that is complete and of this layout; where the job
        stands, as the first rank says it."""
        newest = newest_progress(progress, self._first(layout))
        if newest is not None:
            self.trainers.give(newest)
        return self._first(prepare, newest)

    def _checkpoint(
        self,
        progress: Path,
        curve: bytes,
        describe: Callable[[J], dict[str, Any]],
        save: Callable[[J, Path], None],
        **more: Any,
    ) -> None:
        """Have all ranks write a checkpoint of their step below ``progress``, with the metrics of the steps so far; it counts
        once all of it is there, and says what they ``describe`` and ``more``.

        When it returns, all of it is on this machine's disk, so that older ones may go. Raises EnvironmentFault where a disk
        has no room for it.
        """
        description = self._first(describe)
        folder = folder_of(progress, description["step"])
        if newest_progress(progress, description["layout"]) == folder:
            return  # the one that this run resumed from
        shutil.rmtree(folder, ignore_errors=True)  # of another layout, or of a run that was killed while it wrote
        self._write([folder], save, folder)
        if curve:
            (folder / CURVE).write_bytes(curve)
        complete(folder, {**description, **more})
