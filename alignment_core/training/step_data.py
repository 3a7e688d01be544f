"""The completions that a policy is trained on in one step: columns, on their way from the driver to every rank."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from alignment_core.columns import parts
from alignment_core.models.microbatch import Images, Row, Tokens, TokenSequence
from alignment_core.training.training_rows import epoch_order


@dataclass(frozen=True)
class StepData:
    """S prompts with a completion each, N tokens one after the other, of which K are trained."""

    ids_N: np.ndarray
    targets_N: np.ndarray
    """bool: whether a token is trained."""
    ends_S: np.ndarray
    """End of each completion in the N tokens."""
    groups_S: np.ndarray
    """Number of the prompt that it answers."""
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    """Columns of the K trained tokens that losses need, [K] float32 each, by name."""
    images_S: Seq[Images] = ()
    """Images of each completion and its prompt; empty if none has any."""

    @classmethod
    def of(
        cls,
        prompts: Seq[Tokens],
        completions: Seq[Tokens],
        trained: Seq[Seq[bool] | np.ndarray],
        groups: Seq[int] | None = None,
        images: Seq[Images] = (),
    ) -> StepData:
        """Token ids of prompts and completions, and which of a completion's are ``trained``. ``groups`` are the prompts'
        numbers; without them each completion has a prompt of its own. ``images`` are those of each pair."""
        none = [np.zeros(len(prompt), bool) for prompt in prompts]
        ids = [np.asarray(part, np.int32) for pair in zip(prompts, completions, strict=True) for part in pair]
        targets = [np.asarray(part, bool) for pair in zip(none, trained, strict=True) for part in pair]
        ends_S = np.cumsum([len(part) for part in ids], dtype=np.int64)[1::2]
        groups_S = np.asarray(range(len(ends_S)) if groups is None else groups)
        return cls(np.concatenate(ids), np.concatenate(targets), ends_S, groups_S, images_S=images)

    @cached_property
    def starts_K(self) -> np.ndarray:
        """[S + 1] Start of the numbers of each completion, and the end of the last ones."""
        return np.concatenate([[0], np.cumsum(self.targets_N, dtype=np.int32)[self.ends_S - 1]])

    @property
    def lengths_S(self) -> np.ndarray:
        """Number of trained tokens of each completion."""
        return np.diff(self.starts_K)

    def rows(self) -> list[Row]:
        """One for each completion, in their order."""
        ids, targets = (parts(column, self.ends_S) for column in (self.ids_N, self.targets_N))
        images = [tuple(map(str, files)) for files in self.images_S] or [()] * len(self.ends_S)
        sequences = zip(ids, targets, images, strict=True)
        return [
            Row(number, (TokenSequence(of_ids, of_targets, images=of_images),))
            for number, (of_ids, of_targets, of_images) in enumerate(sequences)
        ]

    def order(self, seed: int, epoch: int) -> list[int]:
        """The order in which an epoch takes the rows: prompts in an order that follows from (seed, epoch), the completions of
        each together, which share its computation."""
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups_S.tolist()):
            rows.setdefault(group, []).append(row)
        of_prompt = list(rows.values())
        return [row for number in epoch_order(len(of_prompt), seed, epoch) for row in of_prompt[number]]

    def batches(self, seed: int, epoch: int, batch_size: int) -> list[list[int]]:
        """The rows of each optimiser step of an epoch, in their :meth:`order`: at most ``batch_size``, in sizes that differ by
        one at most. Failed rewards and filters leave any number of rows, and each step of Adam moves the weights about as far:
        a remainder of a single row would count as much as a whole batch."""
        order = self.order(seed, epoch)
        steps = -(-len(order) // batch_size)
        ends = [len(order) * step // steps for step in range(steps + 1)]
        return [order[start:end] for start, end in pairwise(ends)]

    def places_K(self, rows: Seq[Row]) -> np.ndarray:
        """The indices of the numbers of these rows, in their order."""
        spans = [np.arange(*self.starts_K[row.number : row.number + 2]) for row in rows]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)
