"""Rows → packed micro-batches: which rows a step takes, how they are cut over ranks, and the tensors of one cut.

A row is one sequence (SFT) or two (a pair). Sequences lie as prefix trees in one line, so that what several begin with is
computed once; of models that cannot have that, end to end in lines whose position ids restart with each sequence. How a
batch is cut never changes the result, because every loss is divided by a count over the whole batch
(``Method.normaliser``).
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from alignment_core.canonical import derive_seed
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence
from alignment_core.models.prefix_tree import LEAST_SHARED, Layout, by_prefix, lay_out, shared_tokens

if TYPE_CHECKING:
    import torch

LINE_TOKENS = 128
"""Least width of a line where sequences share nothing. Attention costs width² per line, so that short sequences want short
lines; a longer sequence makes all lines of its pack as long."""


@functools.lru_cache(maxsize=4)
def epoch_order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch takes the rows: a permutation that follows from (seed, epoch)."""
    order = list(range(rows))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return tuple(order)


def batch_of_step(step: int, rows: int, batch_size: int, seed: int) -> list[int]:
    """Row numbers of optimiser step ``step`` (from 0); the last batch of an epoch may be smaller."""
    per_epoch = steps_per_epoch(rows, batch_size)
    epoch, index = divmod(step, per_epoch)
    return list(epoch_order(rows, seed, epoch)[index * batch_size : (index + 1) * batch_size])


def steps_per_epoch(rows: int, batch_size: int) -> int:
    return -(-rows // batch_size)


def cut(rows: Seq[Row], ranks: int, token_budget: int, share: bool = True) -> list[list[list[Row]]]:
    """Cut a batch into packs of at most ``token_budget`` tokens (a longer row is a pack of its own).

    With ``share`` rows that begin alike stay together as far as they fit, and what they share counts once. Every rank gets
    the same number of packs, because ZeRO's collectives run once per pack; a rank may get empty ones. The largest go first
    into the emptiest pack: packs, and so ranks, are balanced. Returns ``[rank][pack][row]``.
    """
    families = _families(rows) if share else [[row] for row in rows]
    tokens_of = _computed if share else lambda family: sum(row.tokens for row in family)
    total = sum(map(tokens_of, families))
    target = min(token_budget, max(1, -(-total // ranks)))  # a family alone is work for all ranks
    pieces = [piece for family in families for piece in _pieces(family, target, token_budget, tokens_of)]
    pieces.sort(key=lambda piece: (-piece[0], piece[1][0].number))
    count = ranks * max(1, -(-total // (token_budget * ranks)))
    while True:
        packs: list[list[Seq[Row]]] = [[] for _ in range(count)]
        loads = [(0, number) for number in range(count)]  # a heap
        for tokens, piece in pieces:
            load, emptiest = loads[0]
            packs[emptiest].append(piece)
            heapq.heapreplace(loads, (load + tokens, emptiest))
        joined = [[row for piece in pieces_of_pack for row in piece] for pieces_of_pack in packs]
        several = [rows_of_pack for rows_of_pack, parts in zip(joined, packs, strict=True) if len(parts) > 1]
        if all(tokens_of(rows_of_pack) <= token_budget for rows_of_pack in several):
            return [joined[rank::ranks] for rank in range(ranks)]
        count += ranks


def _families(rows: Seq[Row]) -> list[list[Row]]:
    """The rows, by what they begin with; in each family neighbours share the most."""
    first = [row.sequences[0].ids for row in rows]
    families: list[list[Row]] = []
    before: np.ndarray | None = None
    for number in by_prefix(first):
        if before is None or shared_tokens(before, first[number]) < LEAST_SHARED:
            families.append([])
        families[-1].append(rows[number])
        before = first[number]
    return families


def _pieces(
    family: Seq[Row], target: int, budget: int, tokens_of: Callable[[Seq[Row]], int]
) -> list[tuple[int, Seq[Row]]]:
    """About as many pieces as there are ``target`` tokens in the family, or more if one would be above ``budget``; the tokens
    of each."""
    count = min(len(family), -(-tokens_of(family) // target))
    while True:
        ends = [len(family) * number // count for number in range(count + 1)]
        found = [(tokens_of(family[first:end]), family[first:end]) for first, end in pairwise(ends)]
        if count == len(family) or max(tokens for tokens, _ in found) <= budget:
            return found
        count += 1


def _computed(rows: Seq[Row]) -> int:
    """Tokens that a pack of these rows has."""
    return len(lay_out([sequence.ids for row in rows for sequence in row.sequences]).ids)


def pack(rows: Seq[Row], device: str = "cpu", share: bool = True) -> MicroBatch:
    """Lay out the sequences of ``rows``: with ``share`` as prefix trees in one line, otherwise each for itself in lines.

    An empty pack is one token, so that its rank joins the collectives.
    """
    import torch

    sequences = [sequence for row in rows for sequence in row.sequences]
    layout = lay_out([s.ids for s in sequences] or [np.zeros(1, np.int64)]) if share else _lines(sequences)
    width = layout.width or len(layout.ids)
    predict, labels, number = [], [], []
    for index, (sequence, places) in enumerate(zip(sequences, layout.places, strict=False)):
        at = np.flatnonzero(sequence.targets)
        predict.append(places[at - 1])
        labels.append(sequence.ids[at])
        number.append(np.full(len(at), index))

    def tensor(parts: Seq[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined.astype(np.int64)).to(device)

    return MicroBatch(
        rows=tuple(rows),
        input_ids=tensor([layout.ids]).view(-1, width),
        position_ids=tensor([layout.positions]).view(-1, width),
        uses=tensor([layout.uses]).view(-1, width),
        predict_K=tensor(predict),
        labels_K=tensor(labels),
        sequence_K=tensor(number),
        last_S=tensor([places[-1:] for places in layout.places[: len(sequences)]]),
        nodes=layout.nodes if share else None,
    )


def _lines(sequences: Seq[TokenSequence]) -> Layout:
    """Each sequence with tokens of its own, in lines as wide as the longest."""
    lengths = [len(sequence.ids) for sequence in sequences]
    width = max([LINE_TOKENS, *lengths]) if sequences else 1
    starts, lines = _first_fit(lengths, width)
    ids, positions, uses = (np.zeros(lines * width, np.int64) for _ in range(3))
    uses[:1] = 1  # also of an empty pack: no sum over one divides by zero
    places = tuple(np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True))
    for sequence, place in zip(sequences, places, strict=True):
        ids[place], positions[place], uses[place] = sequence.ids, np.arange(len(place)), 1
    return Layout(ids, positions, uses, (), places, width)


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
