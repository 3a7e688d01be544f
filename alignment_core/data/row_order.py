"""The order in which training takes the rows of a table: shuffled in each epoch, or as they are (`shuffle: false`).

A mark in the table's schema says the latter, so that every stage that trains on a data set knows it, and the digest of the data
set tells the two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_MARK = {b"alignment.row_order": b"as stored"}


def as_stored(schema: pa.Schema) -> pa.Schema:
    """The schema of a table whose rows are trained on in their order."""
    return schema.with_metadata({**(schema.metadata or {}), **_MARK})


def is_shuffled(schema: pa.Schema) -> bool:
    """Whether training shuffles the rows of a table with this schema."""
    return not (schema.metadata or {}).items() >= _MARK.items()
