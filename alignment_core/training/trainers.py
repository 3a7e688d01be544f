"""The trainer ranks of a run, as the stage that holds them calls them: one job after the other, each call with its deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from alignment_core.artifacts.portable_paths import home_id, is_artifact, share
from alignment_core.cluster.group import ActorGroup, Call, call
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.worker import Job, TrainWorker

J = TypeVar("J")
R = TypeVar("R")
P = ParamSpec("P")


class Trainers:
    """The ranks. Open a job on them with an :class:`OpenJob`."""

    def __init__(self, group: ActorGroup[TrainWorker], timeout: float) -> None:
        """``timeout``: seconds for one call."""
        self.group, self.timeout = group, timeout

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size

    def give(self, folder: Path) -> None:
        """Have a folder of this machine on those of all ranks. Artifacts are fetched there by themselves."""
        if not self.group.elsewhere or is_artifact(folder):
            return
        entries = share(folder)
        for rank in self.group.elsewhere:
            self.group.one(rank, call(TrainWorker.receive, folder, entries, home_id()), self.timeout)

    def close(self) -> None:
        """Have all ranks let go of the open job and its memory."""
        self.group.all(call(TrainWorker.close), self.timeout)


class OpenJob(Generic[J]):
    """What all ranks have open: a ``J`` each. Its facades, one for each kind of job, call it by real methods."""

    def __init__(self, trainers: Trainers, job: Job[J], resources: ResourcesConfig) -> None:
        """Open the job, which closes the one before."""
        self.trainers, self.group, self.timeout = trainers, trainers.group, trainers.timeout
        self.group.all(call(TrainWorker.open, job, resources), self.timeout)

    def _all(self, method: Callable[Concatenate[J, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Call the method on every rank; results in rank order."""
        return self.group.all(call(TrainWorker.do, call(method, *arguments, **named)), self.timeout)

    def _first(self, method: Callable[Concatenate[J, P], R], /, *arguments: P.args, **named: P.kwargs) -> R:
        """Call the method on every rank; what rank 0 gives."""
        return self._all(method, *arguments, **named)[0]

    def _spread(self, calls: Iterable[tuple[int, Call[J, R]]]) -> Iterator[tuple[int, R]]:
        """Make each numbered call on the next idle rank; numbers and results as they come."""
        handed_on = ((number, call(TrainWorker.do, asked)) for number, asked in calls)
        return self.group.spread(handed_on, self.timeout)
