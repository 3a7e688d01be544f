"""A trainer's rows, from the table of a data set, and the rows of each step. They need not fit into memory."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.canonical import derive_seed
from alignment_core.data.row_order import is_shuffled
from alignment_core.disk_list import DiskList
from alignment_core.models.microbatch import Images, Row

if TYPE_CHECKING:
    import pyarrow as pa

    from alignment_core.training.methods.base import BatchMethod, TrainingMethod

Rows = DiskList[Row] | Sequence[Row]

BLOCK = 1000
"""Rows of the table that are in memory at a time."""
IMAGES = "images"
"""The column with the names of the files of a row's images, and the folder of these files beside the table."""
SHOWN = "text"
"""A column for people, which no method reads."""


def training_rows(table: Path, method: TrainingMethod, scratch: Path | None) -> DiskList[Row]:
    """The training rows of ``method`` for the Parquet file ``table``, by number, in a file in ``scratch`` (None: the folder for
    temporary files)."""
    return DiskList(scratch, read_rows(table, method))


def read_rows(table: Path, method: TrainingMethod) -> Iterator[Row]:
    """The same, one at a time, with a block of the table in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    before = 0
    with pq.ParquetFile(table, pre_buffer=False) as file:  # else the whole file is in memory until the last block
        columns = [name for name in file.schema_arrow.names if name != SHOWN]
        for block in file.iter_batches(BLOCK, columns=columns):
            of_block = pa.Table.from_batches([block])
            for row in with_images(method.rows(of_block), of_block, table.parent):
                yield replace(row, number=before + row.number)
            before += block.num_rows


def with_images(rows: Iterable[Row], table: pa.Table, folder: Path) -> Iterator[Row]:
    """The ``rows`` of a table with their images, whose files are in the data set's ``folder``. All sequences of a row have the
    images of its prompt."""
    images_of_rows = images_by_row(table, folder)
    for row in rows:
        images = tuple(str(file) for files in images_of_rows[row.number] for file in files)
        sequences = (replace(sequence, images=images) for sequence in row.sequences) if images else row.sequences
        yield replace(row, sequences=tuple(sequences))


def images_by_row(table: pa.Table, folder: Path) -> Sequence[tuple[Images, ...]]:
    """For each row of a table of the data set in ``folder`` its images, if it has any: nothing, or all of them as the last part
    of a :data:`~alignment_core.models.microbatch.Pair`."""
    if IMAGES not in table.column_names:
        return [()] * len(table)
    rows = table[IMAGES].to_pylist()
    return [(Images(folder / IMAGES / name for name in names),) if names else () for names in rows]


def table_has_images(table: Path) -> bool:
    """Whether rows of the data set of the Parquet file ``table`` have images."""
    import pyarrow.parquet as pq

    return IMAGES in pq.read_schema(table).names


def rows_before(table: Path, method: BatchMethod, rows: Rows, scratch: Path | None) -> Rows:
    """The rows of the pass before a step, for each of the ``rows`` of the Parquet file ``table``, by number; empty without such
    a pass. They are the ``rows`` themselves, or are in a file in ``scratch``."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(table) as file:
        columns = [name for name in file.schema_arrow.names if name != SHOWN]
        if not method.passes_trained_rows:
            whole = file.read(columns)
            return DiskList(scratch, with_images(method.rows_before(whole), whole, table.parent))
        first = file.schema_arrow.empty_table() if not len(rows) else file.read_row_group(0, columns).slice(0, 1)
        return rows if len(method.rows_before(first)) else []


def shuffles(table: Path) -> bool:
    """Whether training shuffles the rows of the Parquet file ``table`` in each epoch."""
    import pyarrow.parquet as pq

    return is_shuffled(pq.read_schema(table))


@functools.lru_cache(maxsize=4)
def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> array[int]:
    """The order of the rows in an epoch: a permutation by (seed, epoch), or without ``shuffle`` their own order. Do not modify
    the result, which is cached."""
    order = array("q", range(rows))
    if shuffle:
        random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def batch_of_step(step: int, rows: int, batch_size: int, seed: int, shuffle: bool = True) -> list[int]:
    """Row numbers of optimiser step ``step`` (from 0); the last batch of an epoch may be smaller."""
    per_epoch = steps_per_epoch(rows, batch_size)
    epoch, index = divmod(step, per_epoch)
    return list(epoch_order(rows, seed, epoch, shuffle)[index * batch_size : (index + 1) * batch_size])


def first_rows(count: int, rows: int, seed: int, shuffle: bool) -> list[int]:
    """Numbers of the first ``count`` rows of training, or of all if there are fewer; in ascending order."""
    return sorted(epoch_order(rows, seed, 0, shuffle)[:count])


def steps_per_epoch(rows: int, batch_size: int) -> int:
    return -(-rows // batch_size)
