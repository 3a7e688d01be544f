"""A store's index as it was a moment ago, for readers that answer often, such as pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from alignment_core.artifacts.index import View
from alignment_core.artifacts.manifest import Manifest
from alignment_core.artifacts.paths import MANIFESTS, STAGES, TAGS
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.tag_history import TagMove
from alignment_core.errors import Corrupt, UserError

log = logging.getLogger(__name__)

SECONDS = 5.0
"""Age from which a snapshot is replaced, in the background: listing a store of 10,000 artifacts takes a tenth of a second, in
S3 seconds."""


class IndexSnapshot:
    """The store in its index, wherever that is: in a file of the home, or in memory where no file can be written.

    Readers of several threads take turns. Only readers who come before the first listing of the store wait for it.
    """

    def __init__(self, store: Store, seconds: float = SECONDS) -> None:
        self.store = store
        self._seconds = seconds
        self._guard = threading.Lock()
        self._refreshing = threading.Lock()
        self._view: View | None = None
        self._taken = 0.0
        self._tried = 0.0
        """When the store was listed last, whether or not that was possible."""
        self._read_at = 0.0
        self._failure: Exception | None = None
        """Of the first listing."""
        self._failed_at = 0.0
        self.problem = ""
        """Why the store cannot be listed now; empty if it can."""
        self.tags: dict[str, Reference] = {}
        """The artifacts that tags point to."""
        self._pruned: frozenset[str] = frozenset()
        """Digests of the artifacts whose bytes retention deleted."""
        self.histories: dict[str, list[TagMove]] = {}
        """The moves of each tag, oldest first."""
        self.moves: dict[Reference, list[TagMove]] = {}
        """The moves of tags to each artifact, oldest first."""

    @property
    def age(self) -> float:
        """Seconds since the store was listed."""
        return time.monotonic() - self._taken

    @contextmanager
    def reading(self) -> Iterator[View]:
        """The store as it was at the latest listing, within the ``with``. Raises if it cannot be listed the first time."""
        self._read_at = time.monotonic()
        old = time.monotonic() - self._tried > self._seconds
        if self._view is not None and old and not self._refreshing.locked():
            threading.Thread(target=self._refresh_quietly, daemon=True).start()
        while True:
            if self._view is None:
                self._list_first()
            with self._guard:
                if self._view is not None:  # it may have been released meanwhile
                    yield self._view
                    return

    def tag(self, name: str) -> Reference | None:
        """The artifact that a tag points to."""
        with self.reading():
            return self.tags.get(name)

    def manifest(self, reference: Reference) -> Manifest:
        """The manifest of an artifact. Raises NotFound."""
        with self.reading() as view:
            known = view.manifest(reference)
        return known or self.store.manifest(reference)  # published since

    def is_pruned(self, reference: Reference) -> bool:
        """Whether retention deleted the bytes of an artifact."""
        with self.reading():
            return reference.digest in self._pruned

    def resolve(self, text: str) -> Reference:
        """The artifact that a text means, as :meth:`Store.resolve` has it."""
        if tagged := self.tag(text):
            return tagged
        with suppress(UserError), self.reading() as view:
            reference = Reference.parse(text)
            if view.manifest(reference) is not None:
                return reference
        return self.store.resolve(text)  # a part of a digest, published since, or unknown

    def _list_first(self) -> None:
        """List the store, unless another reader has done so meanwhile."""
        began = time.monotonic()
        with self._refreshing:
            if self._view is not None:
                return
            if self._failure is not None and self._failed_at > began:  # while this reader waited for the same answer
                raise self._failure
            try:
                self._list()
            except Exception as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise

    def refresh(self) -> None:
        """List the store now."""
        with self._refreshing:
            self._list()

    def _list(self) -> None:
        taken = time.monotonic()
        histories: dict[str, list[TagMove]] = defaultdict(list)
        problem = ""
        try:
            with self.store.index.view(TAGS) as of_tags:
                for move in of_tags.moves():
                    histories[move.name].append(move)
        except Corrupt as error:  # of one move of a tag; all else is there
            problem = str(error)
            histories = defaultdict(list, self.histories)
        moves: dict[Reference, list[TagMove]] = defaultdict(list)
        for move in (move for history in histories.values() for move in history):
            moves[move.to].append(move)
        pruned = self.store.pruned()
        view = self.store.index.view(STAGES, MANIFESTS)
        _ = view.latest  # now, and not in the first request for a list
        with self._guard:
            before, self._view = self._view, view
            self.histories, self.moves, self._pruned = dict(histories), dict(moves), pruned
            self.tags = {name: history[-1].to for name, history in histories.items()}
            self._taken, self._tried, self.problem = taken, taken, problem
            if before is not None:
                before.__exit__()

    def release_if_idle(self, seconds: float) -> None:
        """Release it if nobody has read for some seconds."""
        if self._view is not None and time.monotonic() - self._read_at > seconds:
            self.release()

    def release(self) -> None:
        """Let go of the listing, which keeps the index's log from being shortened; the next reader lists the store again."""
        with self._guard:
            if self._view is not None:
                self._view.__exit__()
                self._view = None

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except Exception as error:  # of any type: readers go on with what there is
            self.problem = str(error)
            self._tried = time.monotonic()
            log.warning("the pages show the store as it was: %s", error)
