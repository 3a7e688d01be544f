"""Arrays of different lengths as one column: of numpy, where each of them ends in it, or of Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def parts(column: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """Views of the arrays that a column is made of. (``np.split`` takes three times as long.)"""
    return [column[start:end] for start, end in pairwise([0, *ends.tolist()])]


def column(table: pa.Table, name: str) -> list:
    """A column of lists or numbers as Python objects; token lists stay numpy arrays."""
    return table.column(name).to_pandas().tolist()


def array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """The ``pyarrow.Array`` of values, of which each may be None; lists may be arrays."""
    import pyarrow as pa

    if not any(isinstance(value, np.ndarray) for value in values):
        return pa.array(values, type_)
    there = [np.asarray(value) for value in values if value is not None and len(value)]
    flat = pa.array(np.concatenate(there) if there else (), type_.value_type)
    missing = [value is None for value in values]
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, flat, type_, mask=pa.array(missing) if any(missing) else None)
