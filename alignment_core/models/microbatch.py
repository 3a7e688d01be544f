"""The input of a model: rows of token sequences, their distribution over ranks, and the tensors of one packed micro-batch.

A row is one sequence (SFT) or two (a pair). Sequences are laid out as prefix trees in one line, so that shared prefixes are
computed once; for models that do not support that, end to end in lines whose position ids restart with each sequence. How a
batch is cut does not change the result, because every loss is divided by a count over the whole batch
(``TrainingMethod.normaliser``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.models.prefix_tree import LEAST_SHARED, Layout, TreeNode, by_prefix, lay_out, shared_tokens

if TYPE_CHECKING:
    import torch


Tokens = Seq[int] | np.ndarray
"""Ids, [T]."""


class Images(tuple[Path, ...]):
    """Files of the images of a sequence, in the order of their tokens."""

    __slots__ = ()


Pair = tuple[Any, ...]
"""Token ids of a prompt and of a completion; and of what follows these in their sequence, if anything does. Last their images,
if they have any."""
LEAST_COMPUTED = 0.85
"""Rows that share less than 15 % of their tokens are packed one by one, because small pieces fill packs better."""
LINE_TOKENS = 128
"""Least width of a line without shared prefixes. Attention costs width² per line, so short sequences go into short lines; a
longer sequence makes all lines of its pack as long."""


def distinct(pairs: Seq[Pair]) -> tuple[list[Pair], list[int]]:
    """The distinct pairs in the order of their first places, and for each of ``pairs`` its index among them."""
    keys = [tuple(map(_key, pair)) for pair in pairs]
    by_key = dict(zip(keys, pairs, strict=True))
    indices = {key: index for index, key in enumerate(by_key)}
    return list(by_key.values()), [indices[key] for key in keys]


def _key(part: Tokens | Images) -> bytes | Images:
    return part if isinstance(part, Images) else np.asarray(part, np.int32).tobytes()


@dataclass(frozen=True)
class TokenSequence:
    """Token ids [T] (integers), and whether each is a target [T] (bool; never the first token, which nothing predicts)."""

    ids: np.ndarray
    targets: np.ndarray
    candidates: np.ndarray | None = None
    """Token ids [targets, C] whose log-probabilities at the place of each target a loss needs, beside the target's own."""
    candidate_values: np.ndarray | None = None
    """Values [targets, C] to compare them with, such as log-probabilities under another model."""
    images: tuple[str, ...] = ()
    """Paths of its images, in the order of their tokens."""

    @classmethod
    def of_prompt_and_completion(cls, prompt: Tokens, completion: Tokens) -> TokenSequence:
        ids = np.concatenate([np.asarray(prompt, np.int64), np.asarray(completion, np.int64)])
        targets = np.arange(len(ids)) >= max(len(prompt), 1)
        return cls(ids, targets)

    def without_padding(self, pad_token_id: int | None) -> TokenSequence:
        """The sequence up to the token at which ``transformers`` takes a score: the last that is not ``config.pad_token_id``.

        A reward model that was trained with the end of turns as padding, as TRL does for a tokenizer without any, is so read at
        the token before it.
        """
        if pad_token_id is None:
            return self
        places = np.flatnonzero(self.ids != pad_token_id)
        length = int(places[-1]) + 1 if len(places) else 1
        return replace(self, ids=self.ids[:length], targets=self.targets[:length])


@dataclass(frozen=True)
class Row:
    """One training row: its sequences (one, or chosen and rejected) and a number that its method may need."""

    number: int
    sequences: tuple[TokenSequence, ...]
    margin: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


@dataclass(frozen=True)
class MicroBatch:
    """Rows packed into L lines of W tokens, with K targets in S sequences. Places are numbered through the lines: 0..L·W-1.

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
    """The prefix trees of the line; None for a layout without shared tokens."""
    images: tuple[str, ...] = ()
    """Paths of the images of its sequences, in the order of their tokens in the lines."""

    @property
    def sequences(self) -> int:
        return len(self.last_S)


def cut(rows: Seq[Row], ranks: int, token_budget: int, share_prefixes: bool = True) -> list[list[list[Row]]]:
    """Cut a batch into packs of at most ``token_budget`` tokens (a longer row is a pack of its own).

    With ``share_prefixes``, rows with a common beginning stay together as far as they fit, and shared tokens count once. Every
    rank gets the same number of packs, because ZeRO's collectives run once per pack; some may be empty. The largest rows go
    first into the emptiest pack, which balances packs and ranks. Returns ``[rank][pack][row]``.
    """
    pieces = _pieces(rows, ranks, token_budget) if share_prefixes else [(row.tokens, [row]) for row in rows]
    pieces.sort(key=lambda piece: (-piece[0], piece[1][0].number))
    total = sum(min(tokens, token_budget) for tokens, _ in pieces)
    large = sum(2 * tokens > token_budget for tokens, _ in pieces)  # no two of these fit into one pack
    count = ranks * max(1, -(-max(-(-total // token_budget), large) // ranks))
    while True:
        packs: list[list[Row]] = [[] for _ in range(count)]
        loads = [(0, pack) for pack in range(count)]
        too_full = False
        for tokens, piece in pieces:
            load, emptiest = loads[0]
            too_full |= load > 0 and load + tokens > token_budget
            packs[emptiest] += piece
            heapq.heapreplace(loads, (load + tokens, emptiest))
        if not too_full:
            return [packs[rank::ranks] for rank in range(ranks)]
        count += ranks * max(1, count // (50 * ranks))  # by 2 %, so that large batches need few attempts


def _pieces(rows: Seq[Row], ranks: int, token_budget: int) -> list[tuple[int, list[Row]]]:
    """The rows in pieces with shared prefixes, each with an upper bound of its tokens in a pack. No piece of several rows is
    above the budget, or so large that ranks would be idle."""
    families = _families(rows)
    sizes = [_tokens(family) for family in families]
    most = min(token_budget, -(-sum(sizes) // ranks))
    pieces: list[tuple[int, list[Row]]] = []
    for size, family in zip(sizes, families, strict=True):
        if size <= most or len(family) == 1:
            pieces.append((size, family))
        elif size > LEAST_COMPUTED * sum(row.tokens for row in family):
            pieces += [(_at_most(row), [row]) for row in family]
        else:
            pieces += _cut_apart(family, most)
    return pieces


def _families(rows: Seq[Row]) -> list[list[Row]]:
    """The rows by common prefix; in each family, neighbours share the longest prefixes."""
    ordered = [rows[number] for number in by_prefix([row.sequences[0].ids for row in rows])]
    families = [[row] for row in ordered[:1]]
    for before, row in pairwise(ordered):
        if shared_tokens(before.sequences[0].ids, row.sequences[0].ids) >= LEAST_SHARED:
            families[-1].append(row)
        else:
            families.append([row])
    return families


def _tokens(family: Seq[Row]) -> int:
    """Number of tokens of these rows in a pack."""
    sequences = [sequence.ids for row in family for sequence in row.sequences]
    return len(lay_out(sequences).ids) if len(sequences) > 1 else len(sequences[0])


def _cut_apart(family: Seq[Row], most: int) -> list[tuple[int, list[Row]]]:
    """Split a family into pieces of at most ``most`` tokens, or of a single row."""
    sizes: list[int] = []
    pieces: list[list[Row]] = []
    for number, row in enumerate(family):
        tokens = _at_most(row)
        more = tokens - (_saved(family[number - 1].sequences[0], row.sequences[0]) if number else 0)
        if sizes and sizes[-1] + more <= most:
            sizes[-1] += more
            pieces[-1].append(row)
        else:
            sizes.append(tokens)
            pieces.append([row])
    return list(zip(sizes, pieces, strict=True))


def _at_most(row: Row) -> int:
    """Upper bound of a row's tokens in a pack, whatever other rows are in it."""
    return row.tokens - sum(_saved(row.sequences[0], later) for later in row.sequences[1:])


def _saved(first: TokenSequence, second: TokenSequence) -> int:
    """Lower bound of the tokens that the second sequence shares with the first: other rows may split the shared prefix, and a
    remainder that is shorter than a node is not shared."""
    tokens = shared_tokens(first.ids, second.ids)
    return max(LEAST_SHARED, tokens - LEAST_SHARED + 1) if tokens >= LEAST_SHARED else 0


def pack(rows: Seq[Row], device: str = "cpu", share_prefixes: bool = True, apart: bool = False) -> MicroBatch:
    """Lay out the sequences of ``rows``: with ``share_prefixes`` as prefix trees in one line (``apart``: each as a tree of its
    own), otherwise separately in lines.

    An empty pack is one token, so that its rank joins the collectives.
    """
    import torch

    sequences = [sequence for row in rows for sequence in row.sequences]
    assert not (share_prefixes and any(sequence.images for sequence in sequences)), "equal ids may be different images"
    ids = [sequence.ids for sequence in sequences] or [np.zeros(1, np.int64)]
    layout = lay_out(ids, apart) if share_prefixes else _lines(sequences)
    width = layout.width or len(layout.ids)
    predict: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for number, (sequence, places) in enumerate(zip(sequences, layout.places, strict=False)):
        targets = np.flatnonzero(sequence.targets)
        predict.append(places[targets - 1])  # the output at a token predicts the next one
        labels.append(sequence.ids[targets])
        numbers.append(np.full(len(targets), number))

    def tensor(parts: Seq[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined.astype(np.int64)).to(device)

    candidates = [sequence.candidates for sequence in sequences if sequence.candidates is not None]
    in_order = sorted(zip(layout.places, sequences, strict=False), key=lambda pair: int(pair[0][0]))
    return MicroBatch(
        rows=tuple(rows),
        input_ids=tensor([layout.ids]).view(-1, width),
        position_ids=tensor([layout.positions]).view(-1, width),
        multiplicity=tensor([layout.multiplicity]).view(-1, width),
        predict_K=tensor(predict),
        labels_K=tensor(labels),
        sequence_K=tensor(numbers),
        last_S=tensor([places[-1:] for places in layout.places[: len(sequences)]]),
        candidates_KC=tensor(candidates) if candidates else None,
        nodes=layout.nodes if share_prefixes else None,
        images=tuple(image for _, sequence in in_order for image in sequence.images),
    )


def _lines(sequences: Seq[TokenSequence]) -> Layout:
    """The layout of sequences without shared tokens, in lines as wide as the longest sequence."""
    lengths = [len(sequence.ids) for sequence in sequences]
    width = max([LINE_TOKENS, *lengths]) if sequences else 1
    starts, lines = _first_fit(lengths, width)
    ids, positions, multiplicity = (np.zeros(lines * width, np.int64) for _ in range(3))
    multiplicity[:1] = 1  # also in an empty pack, so that no sum over it divides by zero
    places = tuple(np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True))
    for sequence, place in zip(sequences, places, strict=True):
        ids[place] = sequence.ids
        positions[place] = np.arange(len(place))
        multiplicity[place] = 1
    return Layout(ids, positions, multiplicity, (), places, width)


def _first_fit(lengths: Seq[int], width: int) -> tuple[list[int], int]:
    """First fit, longest first: the place at which each sequence starts, and the number of lines."""
    starts = [0] * len(lengths)
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        line = next((n for n, taken in enumerate(used) if taken + lengths[index] <= width), len(used))
        if line == len(used):
            used.append(0)
        starts[index] = line * width + used[line]
        used[line] += lengths[index]
    return starts, max(1, len(used))
