"""The Arrow tables of a data set: one fixed schema per purpose, built block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.data.formats import Purpose

BLOCK = 1000
"""Rows per record batch and per Parquet row group: fixed, so that equal rows give equal bytes."""

COLUMNS: dict[Purpose, dict[str, str]] = {
    "sft": {"input_ids": "ids", "loss_mask": "mask", "text": "text", "source": "text"},
    "preference": {
        "prompt_ids": "ids",
        "chosen_ids": "ids",
        "rejected_ids": "ids",
        "margin": "number?",
        "prompt": "text",
        "chosen": "text",
        "rejected": "text",
        "source": "text",
    },
    "prompts": {"prompt_ids": "ids", "prompt": "text", "label": "text?", "task": "text?", "source": "text"},
}
"""Names and kinds of the columns; a question mark allows nulls."""


def schema(purpose: Purpose) -> Any:
    """The ``pyarrow.Schema`` of a purpose. Ids are lists of int32, masks lists of int8, margins float32."""
    import pyarrow as pa

    types = {
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "text": pa.string(),
        "number": pa.float32(),
    }
    fields = COLUMNS[purpose].items()
    return pa.schema([pa.field(name, types[kind.rstrip("?")], nullable=kind.endswith("?")) for name, kind in fields])


def compact(columns: Mapping[str, Any], purpose: Purpose) -> dict[str, Any]:
    """The columns of one row with token lists as arrays: a list of Python numbers takes nine times the memory."""
    import numpy as np

    types = {"ids": np.int32, "mask": np.int8}
    return {
        name: np.asarray(columns[name], types[kind]) if kind in types else columns[name]
        for name, kind in COLUMNS[purpose].items()
    }


def to_table(rows: Sequence[Mapping[str, Any]], purpose: Purpose) -> Any:
    """The ``pyarrow.Table`` of rows that ``compact`` gave."""
    import pyarrow as pa

    layout = schema(purpose)
    blocks = [
        pa.record_batch(
            [_array([row[field.name] for row in rows[start : start + BLOCK]], field.type) for field in layout], layout
        )
        for start in range(0, len(rows), BLOCK)
    ]
    return pa.Table.from_batches(blocks, layout)


def _array(values: Sequence[Any], type_: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    if not pa.types.is_list(type_):
        return pa.array(values, type_)
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)), type=type_)
