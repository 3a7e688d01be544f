"""Downloads of large objects from a server in parts, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from alignment_core.artifacts.os_errors import check_room, explained

PART = 16 << 20
"""Bytes of a part of a large object. A killed upload loses at most one part per thread."""
_THREADS = 4  # per large object; the publisher transfers several objects at once

T = TypeVar("T")


def download_parts(destination: Path, size: int, pieces: Callable[[int, int], Iterator[bytes]]) -> None:
    """Write an object of ``size`` bytes to a new read-only file; ``pieces`` gives its bytes from a start to an end."""
    check_room(destination.parent, size, destination.name)
    with explained("write", destination):
        file = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.truncate(file, size)

            def fetch(start: int) -> None:
                position = start
                for chunk in pieces(start, min(start + PART, size)):
                    position += os.pwrite(file, chunk, position)

            in_threads(fetch, range(0, size, PART))
            os.fchmod(file, 0o444)
        finally:
            os.close(file)


def in_threads(work: Callable[[int], T], items: Sequence[int]) -> list[T]:
    """The results of ``work``, in order, with several threads where there is more than one item."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))
