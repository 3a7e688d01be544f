"""A store as it was listed a moment ago: a few listings replace many checks, each of which is a round trip to a server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, cast

from alignment_core.artifacts.backend import Backend, Object
from alignment_core.artifacts.paths import BLOBS, MANIFESTS, PRUNED, STAGES, SUSPECTS, USES
from alignment_core.artifacts.store import Store
from alignment_core.errors import NotFound

SECONDS = 5.0
"""Maximum age of a snapshot."""
_LISTED = (STAGES, MANIFESTS, BLOBS, SUSPECTS)
_SHORT = 1000  # objects that S3 lists in one answer


class StoreSnapshot:
    """Returns a store as it was at most five seconds ago, to look for finished stages; a store in a folder is returned itself.
    A result may have been deleted since, as after any check.

    With ``uses``, the results are going to be used: each use is first noted in the store itself, and only then are the marks
    of retention read there (``retention``). Otherwise these marks come from the listings, too.
    """

    def __init__(self, store: Store, uses: bool) -> None:
        self.store = store
        self.uses = uses
        self._guard = threading.Lock()
        self._listed_at = -SECONDS
        self._snapshot = store

    def __call__(self) -> Store:
        if not self.store.backend.endpoint:
            return self.store
        with self._guard:
            began = time.monotonic()
            if self._snapshot is self.store or began - self._listed_at > SECONDS:
                backend = cast(Backend, _ListedBackend(self.store, USES if self.uses else PRUNED))
                self._snapshot = Store(backend, self.store.workspace, self.store.index)
                self._listed_at = began
            return self._snapshot


class _ListedBackend:
    """Answers `stat` and `read` from short listings, and leaves everything else to the back end."""

    def __init__(self, store: Store, marks: str) -> None:
        self._backend = store.backend
        self._written = set[str]()  # since the listings
        prefixes = (*_LISTED, marks)
        with ThreadPoolExecutor(len(prefixes)) as pool:
            listings = zip(prefixes, pool.map(self._short_listing, prefixes), strict=True)
            self._listed = {prefix: objects for prefix, objects in listings if objects is not None}
        versions = {
            prefix: {path: stored.version for path, stored in self._listed[prefix].items()}
            for prefix in self._listed.keys() & {STAGES, MANIFESTS}
        }
        with store.index.view_of(versions) as view:
            self._contents = dict(view.contents())

    def stat(self, path: str) -> Object | None:
        listed = self._listed.get(_prefix(path))
        return self._backend.stat(path) if listed is None or path in self._written else listed.get(path)

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        self._written.add(path)
        return self._backend.put(path, source, replaces)

    def read(self, path: str) -> bytes:
        if path in self._contents:
            return self._contents[path]
        if _prefix(path) in self._listed and self.stat(path) is None:
            raise NotFound(f"{self._backend.uri} has no {path}")
        return self._backend.read(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _short_listing(self, prefix: str) -> dict[str, Object] | None:
        """The objects below a prefix, by path; None if there are too many."""
        listed = {stored.path: stored for stored in islice(self._backend.list(prefix), _SHORT + 1)}
        return listed if len(listed) <= _SHORT else None


def _prefix(path: str) -> str:
    return f"{path.partition('/')[0]}/"
