"""The Arrow tables of a data set: the columns of its kind of rows, built block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

BLOCK = 1000
"""Rows per record batch and per Parquet row group: fixed, so that equal rows give equal bytes."""


def schema(columns: Mapping[str, str]) -> Any:
    """The ``pyarrow.Schema`` of columns, given by name and type as ``Kind.columns`` has them; a question mark allows nulls."""
    import pyarrow as pa

    types = {
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "number": pa.float32(),
        "numbers": pa.list_(pa.float32()),
        "truth": pa.bool_(),
    }
    fields = columns.items()
    return pa.schema([pa.field(name, types[type.rstrip("?")], nullable=type.endswith("?")) for name, type in fields])


def compact(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The columns of one row with token lists as arrays: a list of Python numbers takes nine times the memory."""
    import numpy as np

    types = {"ids": np.int32, "mask": np.int8, "numbers": np.float32}
    return {name: np.asarray(row[name], types[type]) if type in types else row[name] for name, type in columns.items()}


def blocks(rows: Iterable[Mapping[str, Any]], layout: Any) -> Iterator[Any]:
    """The ``pyarrow.RecordBatch`` of every ``BLOCK`` rows that ``compact`` gave, of this schema."""
    import pyarrow as pa

    from alignment_core.columns import array

    left = iter(rows)
    while block := list(islice(left, BLOCK)):
        yield pa.record_batch([array([row[field.name] for row in block], field.type) for field in layout], layout)


def to_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Any:
    """The ``pyarrow.Table`` of rows that ``compact`` gave."""
    import pyarrow as pa

    layout = schema(columns)
    return pa.Table.from_batches(blocks(rows, layout), layout)
