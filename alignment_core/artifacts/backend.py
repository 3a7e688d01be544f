"""What storage must offer to hold a store: the few primitives that a new backend module implements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Object:
    """One stored object. ``modified`` is in seconds since the epoch."""

    path: str
    size: int
    modified: float


class Backend(Protocol):
    """Whole objects under plain relative paths; no partial object is ever visible.

    Every method raises EnvironmentFault when the storage is full or access is denied, InfrastructureError when it does not
    answer, and StoreError for a path that would leave the root.
    """

    @property
    def uri(self) -> str:
        """What ``open_store`` accepts to open the same place again."""

    def put_new(self, path: str, source: bytes | Path) -> bool:
        """Create ``path`` atomically and durably; False, and nothing changed, when it exists already."""

    def read(self, path: str) -> bytes:
        """The bytes of a small object. Raises NotFound."""

    def stream(self, path: str) -> Iterator[bytes]:
        """The bytes of an object of any size, in pieces. Raises NotFound."""

    def download(self, path: str, destination: Path) -> None:
        """Materialise an object as the new read-only file ``destination``; who writes into that leaves the object as it
        was. Raises NotFound."""

    def stat(self, path: str) -> Object | None:
        """Size and time of an object; None when there is none."""

    def touch(self, path: str) -> bool:
        """Renew the object's modification time, so that the garbage collector spares it; False when it is gone."""

    def list(self, prefix: str) -> Iterator[Object]:
        """The objects below ``prefix``, which is empty or ends in '/', in order of their paths."""

    def delete(self, path: str, unmodified_since: float = math.inf) -> bool:
        """Delete unless it was modified after ``unmodified_since``; True when it is gone (or never was).

        Of this and a ``touch`` at the same moment one comes first, whatever ends the process between two of its steps.
        """
