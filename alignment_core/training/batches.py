"""Rows → packed micro-batches: which rows a step takes, how they are cut over ranks, and the tensors of one cut.

A row is one sequence (SFT) or two (a pair). Sequences are laid end to end into lines of tokens whose position ids
restart with each sequence; ``transformers`` derives the block-diagonal attention from that. How a batch is cut never
changes the result, because every loss is divided by a count over the whole batch (``Method.normaliser``).
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from alignment_core.canonical import derive_seed
from alignment_core.models.microbatch import MicroBatch, Row

if TYPE_CHECKING:
    import torch

LINE_TOKENS = 128
"""Least width of a line. Attention costs width² per line, so that short sequences want short lines; a longer sequence
makes all lines of its pack as long."""


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


def cut(rows: Seq[Row], ranks: int, token_budget: int) -> list[list[list[Row]]]:
    """Cut a batch into packs of at most ``token_budget`` tokens (a longer row is a pack of its own).

    Every rank gets the same number of packs, because ZeRO's collectives run once per pack; a rank may get empty ones.
    Longest rows first into the emptiest pack: packs, and so ranks, are balanced. Returns ``[rank][pack][row]``.
    """
    by_length = sorted(rows, key=lambda row: (-row.tokens, row.number))
    count = ranks * max(1, -(-sum(row.tokens for row in rows) // (token_budget * ranks)))
    while True:
        packs: list[list[Row]] = [[] for _ in range(count)]
        loads = [(0, number) for number in range(count)]  # a heap
        for row in by_length:
            load, emptiest = loads[0]
            packs[emptiest].append(row)
            heapq.heapreplace(loads, (load + row.tokens, emptiest))
        too_full = any(load > token_budget and len(packs[number]) > 1 for load, number in loads)
        if not too_full:
            return [packs[rank::ranks] for rank in range(ranks)]
        count += ranks


def pack(rows: Seq[Row], device: str = "cpu") -> MicroBatch:
    """Lay the sequences of ``rows`` into lines. An empty pack is one token, so that its rank joins the collectives."""
    import torch

    sequences = [sequence for row in rows for sequence in row.sequences]
    width = max([LINE_TOKENS, *(len(s.ids) for s in sequences)]) if sequences else 1
    starts, lines = _layout([len(s.ids) for s in sequences], width)
    ids, positions, filled = (np.zeros(lines * width, np.int64) for _ in range(3))
    filled[:1] = 1  # also of an empty pack: no sum over one divides by zero
    predict, labels, number = [], [], []
    for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        end = start + len(sequence.ids)
        ids[start:end] = sequence.ids
        positions[start:end] = np.arange(end - start)
        filled[start:end] = 1
        at = np.flatnonzero(sequence.targets)
        predict.append(start + at - 1)
        labels.append(sequence.ids[at])
        number.append(np.full(len(at), index))

    def tensor(parts: Seq[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined.astype(np.int64)).to(device)

    return MicroBatch(
        rows=tuple(rows),
        input_ids=tensor([ids]).view(lines, width),
        position_ids=tensor([positions]).view(lines, width),
        filled=tensor([filled]).view(lines, width),
        predict_K=tensor(predict),
        labels_K=tensor(labels),
        sequence_K=tensor(number),
        last_S=tensor([np.array([start + len(s.ids) - 1]) for s, start in zip(sequences, starts, strict=True)]),
    )


def _layout(lengths: Seq[int], width: int) -> tuple[list[int], int]:
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
