"""A store as it was a moment ago: many looks for the price of a few listings, where each look is a round trip."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from alignment_core.artifacts.backend import Backend, Object
from alignment_core.artifacts.paths import BLOBS, MANIFESTS, PRUNED, STAGES, SUSPECTS, USES
from alignment_core.artifacts.store import Store
from alignment_core.errors import NotFound

SECONDS = 5.0
"""How old the snapshots of ``Lately`` become."""
_LISTED = (STAGES, MANIFESTS, BLOBS, SUSPECTS)
_SHORT = 1000  # objects, that S3 lists in one answer


class StoreSnapshot:
    """Gives a store as it was at most five seconds ago, to look for finished stages; the store itself where a server is not
    asked for it. What was found then can have gone since, as it can after any look.

    With ``uses``, what is found is going to be used: that is noted in the store, and only then is looked whether retention
    takes it just now (``retention``). Else the marks of retention are those of a moment ago, too.
    """

    def __init__(self, store: Store, uses: bool) -> None:
        self.store, self.uses = store, uses
        self._guard = threading.Lock()
        self._made: tuple[float, Store] | None = None

    def __call__(self) -> Store:
        if not self.store.backend.endpoint:
            return self.store
        with self._guard:
            if self._made is None or time.monotonic() - self._made[0] > SECONDS:
                began = time.monotonic()
                seen = Store(cast(Backend, _Snapshot(self.store, USES if self.uses else PRUNED)), self.store.workspace)
                seen.index = self.store.index  # which is of the present
                self._made = began, seen
            return self._made[1]


class _Snapshot:
    """Answers looks from listings, as far as these are short, and hands everything else to the back end."""

    def __init__(self, store: Store, also: str) -> None:
        self._backend = store.backend
        self._put = set[str]()  # here since
        prefixes = (*_LISTED, also)
        with ThreadPoolExecutor(len(prefixes)) as pool:
            listed = zip(prefixes, pool.map(lambda prefix: _short(store.backend, prefix), prefixes), strict=True)
        self._listed = {prefix: found for prefix, found in listed if found is not None}
        versions = {
            prefix: {path: one.version for path, one in self._listed[prefix].items()}
            for prefix in (STAGES, MANIFESTS)
            if prefix in self._listed
        }
        with store.index.view_of(versions) as view:
            self._contents = dict(view.contents())

    def stat(self, path: str) -> Object | None:
        listed = self._listed.get(_prefix(path))
        return self._backend.stat(path) if listed is None or path in self._put else listed.get(path)

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        self._put.add(path)
        return self._backend.put(path, source, replaces)

    def read(self, path: str) -> bytes:
        if path in self._contents:
            return self._contents[path]
        if _prefix(path) in self._listed and self.stat(path) is None:
            raise NotFound(f"{self._backend.uri} has no {path}")
        return self._backend.read(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _short(backend: Backend, prefix: str) -> dict[str, Object] | None:
    """What lies below a prefix, by path; None where it is too much."""
    found: Iterator[Object] = itertools.islice(backend.list(prefix), _SHORT + 1)
    listed = {one.path: one for one in found}
    return listed if len(listed) <= _SHORT else None


def _prefix(path: str) -> str:
    return f"{path.partition('/')[0]}/"
