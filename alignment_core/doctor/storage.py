"""``align store doctor``: the conditions that a store's server honours, its latency, and its throughput."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts import Backend, FolderBackend, Store
from alignment_core.artifacts.paths import TEMPORARY

_CALLS = 10
_THROUGHPUT_BYTES = 32 << 20


class Promise(BaseModel):
    """A guarantee that a store relies on, and whether the storage keeps it."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="what the storage has to do")
    kept: bool = Field(description="whether it did")


class StorageReport(BaseModel):
    """The results for a store."""

    model_config = ConfigDict(frozen=True)

    store: str = Field(description="the store")
    promises: tuple[Promise, ...] = Field(description="what it relies on")
    latency_ms: dict[str, float] = Field(description="median milliseconds of a call, by kind: write, read, look, list")
    mib_per_second: dict[str, float] = Field(description="throughput of one file: write, read")
    second_copy: str = Field(
        default="", description="why a fetched artifact takes its room twice on this disk; empty where it does not"
    )
    clock_seconds: float = Field(
        description="how far the storage's clock is ahead of this machine's; leases use only its own"
    )

    @property
    def sound(self) -> bool:
        """Whether it can hold a store."""
        return all(promise.kept for promise in self.promises)


def examine_storage(store: Store) -> StorageReport:
    """Try the operations of a store in its folder for temporary objects, and remove all traces."""
    with tempfile.TemporaryDirectory() as folder, _temporary(store.backend) as prefix:
        return _Trial(store, Path(folder), prefix).report()


@contextmanager
def _temporary(backend: Backend) -> Iterator[str]:
    """A prefix for temporary objects, which are deleted at the end; in a folder store its directory goes as well."""
    prefix = f"{TEMPORARY}doctor-{uuid.uuid4().hex}/"
    try:
        yield prefix
    finally:
        for entry in list(backend.list(prefix)):
            backend.delete(entry.path)
        if isinstance(backend, FolderBackend):
            with suppress(OSError):
                (backend.root / prefix).rmdir()


def promises_of(backend: Backend) -> tuple[Promise, ...]:
    """Try the conditional writes and the consistency of a store's storage, and leave nothing behind."""
    kept = {}
    with _temporary(backend) as prefix:
        path = f"{prefix}conditions"
        first = backend.put(path, b"first")
        kept["creates an object that is absent"] = first is not None
        kept["refuses to create one that exists"] = backend.put(path, b"second") is None
        refused = backend.put(path, b"second", replaces="another version") is None
        kept["refuses to replace another version than the one that was read"] = refused
        replaced = first is not None and backend.put(path, b"third", replaces=first) is not None
        kept["replaces the version that was read"] = replaced
        kept["reads what was just written"] = backend.read(path) == b"third"
        kept["lists what was just written"] = [entry.path for entry in backend.list(prefix)] == [path]
        backend.delete(path)
        gone = backend.stat(path) is None and not list(backend.list(prefix))
        kept["has nothing left of what was just deleted"] = gone
    return tuple(Promise(name=name, kept=is_kept) for name, is_kept in kept.items())


class _Trial:
    def __init__(self, store: Store, folder: Path, prefix: str) -> None:
        self.backend = store.backend
        self.uri = store.uri
        self.folder = folder
        self.prefix = prefix
        self.large = f"{self.prefix}large"
        self.latency: dict[str, list[float]] = {}

    def report(self) -> StorageReport:
        promises = promises_of(self.backend)
        self._calls()
        mib_per_second = self._throughput()
        folder = self.backend if isinstance(self.backend, FolderBackend) else None
        return StorageReport(
            store=self.uri,
            promises=promises,
            latency_ms={kind: round(1000 * statistics.median(seconds), 2) for kind, seconds in self.latency.items()},
            mib_per_second=mib_per_second,
            second_copy=folder.why_copied(self.large) if folder else "",
            clock_seconds=round(self.backend.now() - time.time(), 1),
        )

    def _calls(self) -> None:
        for number in range(_CALLS):
            path = f"{self.prefix}call-{number}"
            self._timed("write", self.backend.put, path, os.urandom(1024))
            self._timed("read", self.backend.read, path)
            self._timed("look", self.backend.stat, path)
            self._timed("list", lambda: list(self.backend.list(self.prefix)))

    def _timed(self, kind: str, call: Callable[..., object], *arguments: object) -> None:
        began = time.monotonic()
        call(*arguments)
        self.latency.setdefault(kind, []).append(time.monotonic() - began)

    def _throughput(self) -> dict[str, float]:
        source = self.folder / "source"
        target = self.folder / "target"
        source.write_bytes(os.urandom(_THROUGHPUT_BYTES))
        began = time.monotonic()
        self.backend.put(self.large, source)
        written = time.monotonic()
        self.backend.download(self.large, target)
        read = time.monotonic()
        mib = _THROUGHPUT_BYTES / 2**20
        return {"write": round(mib / (written - began), 1), "read": round(mib / (read - written), 1)}
