"""The interface between the trainer and a training method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from alignment_core.models.microbatch import MicroBatch, Row

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from alignment_core.models.loading import Head


class TrainingMethod(Protocol):
    """Turns rows into token sequences, and the model's output on a micro-batch into a loss.

    A class attribute ``loss_is_sum = True`` declares that the loss is the sum of the outputs, times a number: see ``of_sum`` of
    :class:`~alignment_core.models.vocabulary_head.VocabularyHead`.
    """

    head: ClassVar[Head]
    """``lm``: the model's output is the log-probability of each target [K]; ``score``: one score per sequence [S]."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the summed log-probability of every sequence under a reference policy."""

    def rows(self, table: pa.Table) -> list[Row]:
        """Training rows of a data set, in its order."""

    def normaliser(self, rows: Sequence[Row]) -> float:
        """The divisor of the loss of these rows: their targets, or their number. Called with a whole batch."""

    def loss(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed (not averaged) over the micro-batch, and sums of metrics, all to be divided alike."""


@runtime_checkable
class BatchMethod(TrainingMethod, Protocol):
    """A method for which the loss of a row depends on the whole batch.

    Before each step, and before held-out rows are evaluated, the trainer passes the batch's ``rows_before`` through the model
    without a gradient and adds up ``sums_before`` over all micro-batches and ranks. So the loss does not depend on how the
    batch is cut. A class attribute ``passes_held_out = False`` declares that the loss of held-out rows needs no sums.
    """

    def rows_before(self, table: pa.Table) -> Sequence[Row]:
        """The row of the pass before a step for each training row of a data set, in its order; empty: no pass."""

    @property
    def passes_trained_rows(self) -> bool:
        """Whether ``rows_before`` are the training rows themselves. The reference's log-probabilities of other rows are in the
        columns after those of the training rows."""

    def sums_before(self, output: Tensor, batch: MicroBatch, reference_S: Tensor | None) -> Tensor:
        """Sums over a micro-batch of this pass, in one dimension."""

    def of_batch(self, rows: Sequence[Row], sums: Tensor | None, done: float | None) -> TrainingMethod:
        """The method for a batch of these training rows, with the sums of the pass before; None if there was none.

        ``done`` is the fraction of steps that are done, from 0 in the first step to 1 in the last; None for held-out rows,
        whose losses must be comparable over the steps.
        """
