"""The primitives that storage must offer to hold a store, and that a new backend module implements.

None of them needs a shared file system: an object is created or replaced whole, on a condition that the storage itself
checks, and all times are the storage's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from alignment_core.errors import NotFound, StoreError

_ATTEMPTS = 5  # a writer loses only to another writer of the same object


class Object(NamedTuple):
    """One stored object. ``modified`` is in seconds since the epoch by the clock that ``Backend.now`` reads; ``version``
    changes whenever the object is replaced by other bytes."""

    path: str
    size: int
    modified: float
    version: str


class Backend(Protocol):
    """Whole objects under plain relative paths; no partial object is ever visible, and what was acknowledged stays.

    Every method raises EnvironmentFault when the storage is full or access is denied, InfrastructureError when it does not
    answer, and StoreError for a path that would leave the root. May be pickled, forked and used from several threads.
    """

    @property
    def uri(self) -> str:
        """What ``open_store`` accepts to open the same place again."""

    @property
    def endpoint(self) -> str:
        """The address of the server that keeps the objects; empty if there is no server."""

    @property
    def few_writes(self) -> bool:
        """Whether the storage limits writes per hour: then leases are renewed rarely and left to the collector when
        nothing waits for their end, and only a new store is probed."""

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        """Create ``path`` atomically and durably if it does not exist, or replace it if it has the version ``replaces``.

        Returns the new version; None, and nothing changed, when the condition does not hold: of several writers one wins.
        """

    def read(self, path: str) -> bytes:
        """The bytes of a small object. Raises NotFound."""

    def stream(self, path: str) -> Iterator[bytes]:
        """The bytes of an object of any size, in pieces. Raises NotFound."""

    def download(self, path: str, destination: Path) -> None:
        """Materialise an object as the new read-only file ``destination``; writing to that file does not
        change the object. Raises NotFound."""

    def stat(self, path: str) -> Object | None:
        """Size, time and version of an object; None when there is none."""

    def list(self, prefix: str) -> Iterator[Object]:
        """The objects below ``prefix``, which is empty or ends in '/', in order of their paths."""

    def delete(self, path: str, version: str | None = None) -> None:
        """Delete an object, with ``version`` only if it still has that version. A missing object is not an error."""

    def now(self) -> float:
        """The storage's clock, in seconds since the epoch, which ``Object.modified`` uses, too."""

    def unfinished(self) -> Iterator[Object]:
        """Unfinished uploads of all writers. They use space until they finish or are dropped."""

    def drop(self, upload: Object) -> None:
        """Give up one of the ``unfinished`` uploads."""


def overwrite(backend: Backend, path: str, data: bytes) -> None:
    """Create an object or replace its bytes. Raises StoreError if other writers keep replacing it."""
    for _ in range(_ATTEMPTS):
        if backend.put(path, data):
            return
        existing = backend.stat(path)
        with suppress(NotFound):  # deleted since `stat`
            if existing and (backend.read(path) == data or backend.put(path, data, existing.version)):
                return
    raise StoreError(f"{path} in {backend.uri} changes faster than it can be written")
