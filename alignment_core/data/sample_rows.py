"""`rows: N` of a source: N of its rows, chosen by their digests, in the order of the source."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.data.fields import ArrowRow
from alignment_core.disk_list import DiskList

if TYPE_CHECKING:
    from alignment_core.data.origins import LocatedRow

TOO_DEEP = "is nested too deeply"
"""The reason why a row is malformed that Python's recursion limit keeps from being compared or stored."""


def sample_rows(rows: Iterable[LocatedRow], count: int, seed: int, scratch: Path | None = None) -> Iterator[LocatedRow]:
    """The ``count`` rows with the smallest digests of their content and the ``seed``, in their order.

    The choice depends on the content of the rows alone: more rows replace few of them, and a smaller ``count`` chooses a
    part of the same rows. Of equal rows the first ones are chosen. All rows are read, once; candidates are in a file in
    ``scratch`` (None: the folder for temporary files), with about 200 bytes per chosen row in memory.
    """
    candidates = DiskList["LocatedRow"](scratch)
    largest: list[tuple[int, int, int]] = []
    """A heap whose first item is the chosen row with the largest digest: negative digest, negative place, number on disk."""
    for place, (where, row) in enumerate(rows):
        try:
            digest = _digest(row, seed)
        except RecursionError:
            row = TOO_DEEP
            digest = _digest(row, seed)
        item = (-digest, -place, len(candidates))
        if len(largest) < count:
            heapq.heappush(largest, item)
        elif item > largest[0]:
            heapq.heapreplace(largest, item)
        else:
            continue
        try:
            candidates.append((where, row))
        except RecursionError:
            candidates.append((where, TOO_DEEP))
    yield from candidates.chosen(sorted(number for _, _, number in largest))


def _digest(row: dict[str, Any] | str, seed: int) -> int:
    """The same for a row of a text format and of a column format. Values that JSON cannot represent, such as decoded
    images, count by their type."""
    content = row.unpadded() if isinstance(row, ArrowRow) else row
    text = json.dumps([seed, content], sort_keys=True, default=lambda value: type(value).__name__)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
