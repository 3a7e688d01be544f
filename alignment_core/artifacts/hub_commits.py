"""Changes of a dataset repo in few commits: concurrent changes of a process's threads share a commit.

The Hub limits commits per hour. A commit names its parent, so that it is made only while that is the head: all conditions
are evaluated at one commit, and hold when the next one is made.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from alignment_core.artifacts.hub_requests import TRIES, HubRepo, Moved, endpoint
from alignment_core.errors import InfrastructureError

_MOST_CHANGES, _MOST_BYTES = 100, 32 << 20  # of one commit
_SHORTEST_WAIT, _LONGEST_WAIT = 0.2, 60.0
"""Bounds, in seconds, of the wait for changes of other threads, which lasts as long as sending the own content did."""
_ROUNDS = 200
"""Attempts to commit on top of the head. In each round some writer wins, so with fewer writers than rounds all succeed."""


@dataclass(frozen=True)
class Large:
    """A file whose bytes are already on the Hub, uploaded by LFS under their SHA-256."""

    sha256: str
    size: int


@dataclass(eq=False)
class Change:
    """A change by one caller: write ``content`` to ``path`` (None: delete it) if its version is ``replaces`` (None: if there is
    no such file). A deletion without ``replaces`` has no condition."""

    path: str
    content: bytes | Large | None
    replaces: str | None
    deadline: float  # waits for the changes of other threads until this time of the monotonic clock
    version: str | None = field(default=None, init=False)  # the new version; None if the condition did not hold
    failure: Exception | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)


class Commits:
    """The commits of this process in one repo, one after the other."""

    def __init__(self, repo: HubRepo) -> None:
        self.repo = repo
        self._waiting = list[Change]()
        self._preparing = 0  # changes whose content is still being sent
        self._queued = threading.Condition()
        self._committing = threading.Lock()

    def make(self, path: str, content: Callable[[], bytes | Large | None], replaces: str | None = None) -> str | None:
        """The new version; None when the condition does not hold. ``content`` may send a large file first.

        The first thread commits the batch for all waiting threads; it waits briefly for threads that still send content.
        """
        change = self._enqueue(path, content, replaces)
        while not change.done:
            with self._committing:
                if not change.done:
                    self._commit_next()
        if change.failure is not None:
            raise copy.copy(change.failure) from change.failure  # several threads raise it, each with its own traceback
        return change.version

    def _enqueue(self, path: str, content: Callable[[], bytes | Large | None], replaces: str | None) -> Change:
        began = time.monotonic()
        with self._queued:
            self._preparing += 1
        try:
            ready = content()
            with self._queued:
                now = time.monotonic()
                wait = min(max(now - began, _SHORTEST_WAIT), _LONGEST_WAIT)
                change = Change(path, ready, replaces, now + wait)
                self._waiting.append(change)
            return change
        finally:
            with self._queued:
                self._preparing -= 1
                self._queued.notify_all()

    def _commit_next(self) -> None:
        batch, failure = list[Change](), None
        try:
            self._wait_for_others()
            head, _ = self.repo.head()
            batch = self._next_batch()
            self._commit(batch, head)
        except BaseException as error:
            failure = error if isinstance(error, Exception) else InfrastructureError("the commit was interrupted")
            if not isinstance(error, Exception):
                raise
        finally:
            for change in batch or self._next_batch():
                change.failure, change.done = failure, True

    def _wait_for_others(self) -> None:
        """Wait while other threads still send content, so that their changes share the commit: commits are rationed."""
        with self._queued:
            while self._preparing and len(self._waiting) < _MOST_CHANGES:
                left = min(change.deadline for change in self._waiting) - time.monotonic()
                if left <= 0:
                    return
                self._queued.wait(left)

    def _next_batch(self) -> list[Change]:
        with self._queued:
            size, count = 0, 0
            for change in self._waiting[:_MOST_CHANGES]:
                size += len(change.content) if isinstance(change.content, bytes) else 0
                if count and size > _MOST_BYTES:
                    break
                count += 1
            batch = self._waiting[:count]
            self._waiting = self._waiting[count:]
            return batch

    def _commit(self, batch: list[Change], head: str) -> None:
        """Make the changes of a batch whose conditions hold, and set the result of each.

        If an answer is lost, reading tells whether the commit was made: the commit after ``tried`` then has this writer's
        name. While the head is ``tried``, the commit may still be made, so that the next attempt sends the same one.
        """
        writer = uuid.uuid4().hex
        tried = None
        unanswered = 0
        for attempt in range(_ROUNDS):
            if attempt:
                # Full jitter: writers that collided at this head must not collide again at the next one.
                time.sleep(random.uniform(0, min(2.0, 0.02 * 2 ** min(attempt, 10))))
                head, _ = self.repo.head()
            if tried is not None and tried != head:
                if writer in self.repo.following(tried):
                    return
                unanswered = 0
            writes = self._evaluate(batch, head)
            if not writes:
                return
            tried = head
            try:
                self.repo.commit(_lines(writes, head, writer))
                return
            except Moved:
                continue
            except InfrastructureError:
                unanswered += 1
                if unanswered == TRIES:
                    raise
        raise InfrastructureError(f"other writers change {self.repo.uri} faster than this process can commit")

    def _evaluate(self, batch: list[Change], head: str) -> dict[str, bytes | Large | None]:
        """Decide in order which changes hold at a commit; returns the contents to write."""
        paths = list(dict.fromkeys(change.path for change in batch))
        versions = {
            entry["path"]: version_of(entry) for entry in self.repo.entries(head, paths, expand=False) if is_file(entry)
        }
        state, writes = dict[str, str | None](versions), dict[str, bytes | Large | None]()
        for change in batch:
            is_unconditional = change.content is None and change.replaces is None
            holds = is_unconditional or state.get(change.path) == change.replaces
            change.version = _version(change.content) if holds else None
            if holds:
                state[change.path], writes[change.path] = change.version, change.content
        return {path: content for path, content in writes.items() if state[path] != versions.get(path)}


_all = dict[str, Commits]()
os.register_at_fork(after_in_child=_all.clear)


def commits_of(repo: HubRepo) -> Commits:
    """The commits of this process, shared by all of its store objects."""
    return _all.setdefault(f"{endpoint()} {repo.name}", Commits(repo))


def is_file(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "file")


def version_of(entry: dict[str, Any]) -> str:
    """The version of a file on the Hub: the SHA-256 of a large file, otherwise git's id of the blob."""
    return str(entry["lfs"]["oid"] if entry.get("lfs") else entry["oid"])


def _version(content: bytes | Large | None) -> str | None:
    if isinstance(content, bytes):
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return content.sha256 if content else None


def _lines(writes: dict[str, bytes | Large | None], parent: str, writer: str) -> bytes:
    """A commit in the Hub's format: one JSON object a line."""
    first, *others = writes
    title = first + (f" and {len(others)} more" if others else "")
    operations: list[tuple[str, dict[str, Any]]] = [
        ("header", {"summary": title, "description": f"writer {writer}", "parentCommit": parent})
    ]
    for path, content in writes.items():
        if content is None:
            operations.append(("deletedFile", {"path": path}))
        elif isinstance(content, Large):
            operations.append(
                ("lfsFile", {"path": path, "algo": "sha256", "oid": content.sha256, "size": content.size})
            )
        else:
            text = base64.b64encode(content).decode()
            operations.append(("file", {"path": path, "content": text, "encoding": "base64"}))
    return b"".join(json.dumps({"key": key, "value": value}).encode() + b"\n" for key, value in operations)
