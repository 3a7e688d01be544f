"""The rows of a source, one at a time, each with the file and line that an error message can name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from alignment_core.canonical import derive_seed
from alignment_core.data.kinds import Kind
from alignment_core.data.origins import origin_of
from alignment_core.data.pin import PinnedSource


@dataclass(frozen=True)
class Row:
    values: dict[str, Any]
    where: str
    source: int


@dataclass(frozen=True)
class BadRow:
    """A row that could not even be read."""

    where: str
    reason: str
    source: int


def read(pinned: PinnedSource, index: int, seed: int, kind: Kind) -> Iterator[Row | BadRow]:
    """Yield the rows of source number ``index``, at most ``rows`` of them, in the order of the source.

    Raises DataError where a whole file cannot be read or has changed since it was pinned, UserError where the source has no
    rows for this kind.
    """
    rows = origin_of(pinned.source).read(pinned, derive_seed(seed, index), kind)
    for where, row in islice(rows, pinned.source.rows):
        yield BadRow(where, row, index) if isinstance(row, str) else Row(row, where, index)
