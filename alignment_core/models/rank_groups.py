"""Groups of neighbouring trainer ranks that compute each micro-batch together."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from alignment_core.errors import UserError


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks that compute the micro-batches of this one together; by default this rank alone."""

    size: int = 1
    rank: int = 0
    """Number of this rank in its group."""
    processes: Any = None
    """Their process group; None for a rank alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose sums count: all ranks of the group have the same."""
        return self.rank == 0

    def share(self, ranks: int, rank: int) -> tuple[int, int]:
        """Number of groups among so many ranks, and that of the group of this rank."""
        return ranks // self.size, rank // self.size


def check_divides(size: int, field: str) -> None:
    """Raise UserError if the ranks are no multiple of a ``size`` of groups, which this field of the recipe sets."""
    ranks = dist.get_world_size()
    if ranks % size:
        raise UserError(
            f"{field} {size} does not divide the {ranks} trainers: set resources.trainers to a multiple of it"
        )


@functools.cache  # process groups live as long as their processes
def neighbours(size: int, seconds: float) -> Any:
    """The process group of this rank and its neighbours, ``size`` ranks. Collective over all ranks, as is :func:`peers`."""
    return _own([range(first, first + size) for first in range(0, dist.get_world_size(), size)], seconds)


@functools.cache
def peers(size: int, seconds: float) -> Any:
    """The process group of the ranks that have the number of this one in their groups of ``size`` ranks."""
    return _own([range(first, dist.get_world_size(), size) for first in range(size)], seconds)


def _own(groups: list[range], seconds: float) -> Any:
    """The process group of this rank among those of all ``groups``; each collective has so many ``seconds``."""
    made = {ranks: dist.new_group([*ranks], timeout=timedelta(seconds=seconds)) for ranks in groups}
    return next(processes for ranks, processes in made.items() if dist.get_rank() in ranks)
