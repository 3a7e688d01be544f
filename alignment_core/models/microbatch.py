"""The input of a model: rows of token sequences, packed into lines, as tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from alignment_core.models.prefix_tree import TreeNode


Tokens = Seq[int] | np.ndarray
"""Ids, [T]."""
Pair = tuple[Tokens, Tokens]
"""Token ids of a prompt and of a completion."""


def distinct(pairs: Seq[Pair]) -> tuple[list[Pair], list[int]]:
    """The distinct pairs in the order of their first places, and for each of ``pairs`` its index among them."""
    keys = [tuple(np.asarray(ids, np.int32).tobytes() for ids in pair) for pair in pairs]
    by_key = dict(zip(keys, pairs, strict=True))
    indices = {key: index for index, key in enumerate(by_key)}
    return list(by_key.values()), [indices[key] for key in keys]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids [T] (integers) and which of them are targets [T] (bool; the first token never is)."""

    ids: np.ndarray
    targets: np.ndarray
    candidates: np.ndarray | None = None
    """Token ids [targets, C] whose log-probabilities a loss needs in place of each target, beside the target's own."""
    candidate_values: np.ndarray | None = None
    """Values that the loss compares them with, such as log-probabilities under another model [targets, C]."""

    @classmethod
    def of_prompt_and_completion(cls, prompt: Tokens, completion: Tokens) -> TokenSequence:
        ids = np.concatenate([np.asarray(prompt, np.int64), np.asarray(completion, np.int64)])
        targets = np.arange(len(ids)) >= max(len(prompt), 1)
        return cls(ids, targets)


@dataclass(frozen=True)
class Row:
    """One training row: its sequences (one, or chosen and rejected) and the extra numbers that its method needs."""

    number: int
    sequences: tuple[TokenSequence, ...]
    margin: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


@dataclass(frozen=True)
class MicroBatch:
    """Rows packed into L lines of W tokens, with K targets in S sequences. Places count through the lines, 0..L·W-1.

    Where sequences share their prefixes there is one line, and a token may belong to several of them.
    """

    rows: tuple[Row, ...]
    input_ids: torch.Tensor  # [L, W]
    position_ids: torch.Tensor  # [L, W], each token's place in its sequences; 0 for padding
    multiplicity: torch.Tensor  # [L, W], number of sequences that each token belongs to; 0 for padding
    predict_K: torch.Tensor  # [K], place whose output predicts the target
    labels_K: torch.Tensor  # [K], the target's token id
    sequence_K: torch.Tensor  # [K], the target's sequence, 0..S-1
    last_S: torch.Tensor  # [S], place of each sequence's last token
    candidates_KC: torch.Tensor | None = None
    """Candidate tokens of each target, if the rows have any."""
    nodes: tuple[TreeNode, ...] | None = None
    """The prefix trees of the line; None where sequences share no tokens."""

    @property
    def sequences(self) -> int:
        return len(self.last_S)
