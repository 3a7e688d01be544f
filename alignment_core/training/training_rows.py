"""The rows that a trainer takes, from the table of a data set; they need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from alignment_core.data.row_order import is_shuffled
from alignment_core.disk_list import DiskList
from alignment_core.models.microbatch import Row

if TYPE_CHECKING:
    from alignment_core.training.methods.base import BatchMethod, Method

Rows = DiskList[Row] | Sequence[Row]

BLOCK = 1000
"""Rows of the table that are in memory at a time."""
SHOWN = "text"
"""The column that people read, and no method."""


def training_rows(table: Path, method: Method, scratch: Path | None) -> DiskList[Row]:
    """What ``method`` makes of each row of the Parquet file ``table``, by number; they lie in a file in ``scratch`` (None:
    where temporary files go)."""
    return DiskList(scratch, _rows(table, method))


def rows_before(table: Path, method: BatchMethod, rows: Rows, scratch: Path | None) -> Rows:
    """What passes through the model before a step on some of the ``rows`` of the Parquet file ``table``, by their numbers; none
    if nothing does. They are the ``rows`` themselves, or lie in a file in ``scratch``."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(table) as file:
        columns = [name for name in file.schema_arrow.names if name != SHOWN]
        if not method.passes_trained_rows:
            return DiskList(scratch, method.rows_before(file.read(columns)))
        first = file.schema_arrow.empty_table() if not len(rows) else file.read_row_group(0, columns).slice(0, 1)
        return rows if len(method.rows_before(first)) else []


def shuffles(table: Path) -> bool:
    """Whether training takes the rows of the Parquet file ``table`` in an order of its own in each epoch."""
    import pyarrow.parquet as pq

    return is_shuffled(pq.read_schema(table))


def _rows(table: Path, method: Method) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    before = 0
    with pq.ParquetFile(table) as file:
        columns = [name for name in file.schema_arrow.names if name != SHOWN]
        for block in file.iter_batches(BLOCK, columns=columns):
            for row in method.rows(pa.Table.from_batches([block])):
                yield replace(row, number=before + row.number)
            before += block.num_rows
