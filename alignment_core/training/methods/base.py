"""What the trainer asks of a method; everything else about training is the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from alignment_core.models.microbatch import MicroBatch, Row

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


class Method(Protocol):
    """A method turns rows into token sequences, and the model's output on a micro-batch into a loss."""

    head: ClassVar[Head]
    """``lm``: the model's output is the log-probability of each target [K]; ``score``: one score per sequence [S]."""
    needs_reference: ClassVar[bool]
    """Whether the loss is given the summed log-probability of every sequence under a reference policy."""

    def rows(self, table: pa.Table) -> list[Row]:
        """Training rows of a data set, in its order."""

    def normaliser(self, rows: Sequence[Row]) -> float:
        """What the loss of these rows is divided by: their targets, or their number. Called with a whole batch."""

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed (not averaged) over the micro-batch, and sums of metrics, all to be divided alike."""
