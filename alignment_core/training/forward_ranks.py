"""A frozen model on every rank, as the stage calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from alignment_core.cluster.group import call
from alignment_core.models.microbatch import Pair
from alignment_core.training.forward import Forward
from alignment_core.training.trainers import OpenJob


class ForwardRanks(OpenJob[Forward]):
    """Forward passes; every rank works on blocks of its own."""

    def run(self, blocks: Iterable[tuple[int, Sequence[Pair]]]) -> Iterator[tuple[int, np.ndarray]]:
        """:meth:`Forward.run` for each numbered block; numbers and values as they come."""
        return self._spread((number, call(Forward.run, pairs)) for number, pairs in blocks)
