"""Values that need not fit into memory: they are kept in a file, and each is read on access."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Generic, TypeVar

V = TypeVar("V")


class DiskList(Generic[V]):
    """Values by number, in the order in which they came. Their file has no name, so that it is gone with this process; eight
    bytes of each stay in memory. Recently read values stay in the operating system's file cache if there is memory for them."""

    def __init__(self, folder: Path | None, values: Iterable[V] = ()) -> None:
        """The file lies in ``folder``; None: where temporary files go. Raises OSError if the disk has no room."""
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it lives as long as this object)
        self._ends = array("q", [0])
        for value in values:
            self.append(value)

    def append(self, value: V) -> None:
        """Add a value that can be pickled. Raises OSError if the disk has no room for it."""
        self._ends.append(self._ends[-1] + self._file.write(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> V:
        if not 0 <= number < len(self):
            raise IndexError(f"number {number} of {len(self)} values")
        self._file.flush()
        start, end = self._ends[number], self._ends[number + 1]
        value: V = pickle.loads(os.pread(self._file.fileno(), end - start, start))
        return value

    def __iter__(self) -> Iterator[V]:
        return (self[number] for number in range(len(self)))

    def chosen(self, numbers: Iterable[int]) -> Iterator[V]:
        """The values of these numbers."""
        return (self[number] for number in numbers)
