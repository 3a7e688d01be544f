"""The blobs of a store: adding, verifying and repairing them. A blob that does not match its digest is never returned."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alignment_core.artifacts.backend import Backend, Object
from alignment_core.artifacts.manifest import FileEntry
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import SUSPECTS, blob_path, suspect_path
from alignment_core.artifacts.workspace import Workspace
from alignment_core.canonical import digest_of_file
from alignment_core.errors import MAKE_IT_AGAIN, Changed, Corrupt, EnvironmentFault, NotFound, StoreError
from alignment_core.heartbeat import beating

_ATTEMPTS = 5
_THREADS = 8
_STREAMED = 1 << 20
"""Bytes of a blob that come from a server in one piece, and are hashed on their way."""


class Blobs:
    """Blobs by digest.

    A reader that finds a blob corrupt marks it as suspect instead of deleting it: then ``is_intact`` is False, the
    stage that made it runs again, and ``put`` compares the bytes and replaces them.
    """

    def __init__(self, backend: Backend, workspace: Workspace) -> None:
        self.backend = backend
        self.workspace = workspace
        self._verified: dict[tuple[int, int, int, int], str] = {}  # (device, inode, size, mtime) -> SHA-256

    def put(self, entry: FileEntry, source: Path, hashed: os.stat_result) -> bool:
        """Store the file ``source`` as the blob of ``entry`` unless an intact one exists; whether it is new.

        ``hashed`` is the state of the file before it was hashed; Changed when it has changed since.
        """
        path, existing = blob_path(entry.sha256), None
        for _ in range(_ATTEMPTS):
            if self.backend.put(path, source, replaces=existing.version if existing else None):
                if _identity(source.lstat()) != _identity(hashed):
                    self.backend.delete(path)
                    raise Changed(f"{source} changed while it was being published: publish it again")
                return True
            existing = self.backend.stat(path)
            if existing is not None and not self._is_damaged(entry, existing):
                return False
        raise StoreError(f"{path} in {self.backend.uri} changes faster than it can be written")

    def put_files(
        self, entries: Sequence[FileEntry], directory: Path, hashed: Mapping[str, os.stat_result]
    ) -> dict[FileEntry, bool]:
        """Store files of a directory, several at a time; which of them are new. ``hashed`` has their states by path."""
        with ThreadPoolExecutor(_THREADS) as pool:
            put = pool.map(lambda entry: self.put(entry, directory / entry.path, hashed[entry.path]), entries)
            new = list(beating(put))
        is_new = dict(zip(entries, new, strict=True))
        self.trust(entry for entry in is_new if is_new[entry])
        return is_new

    def trust(self, new: Iterable[FileEntry]) -> None:
        """Clear the suspicions of readers about blobs that were ``put`` since."""
        digests = {entry.sha256 for entry in new}
        for suspect in self.backend.list(SUSPECTS) if digests else ():
            if suspect.path.removeprefix(SUSPECTS) in digests:
                self.backend.delete(suspect.path)

    def get(self, owner: str, entry: FileEntry, to: Path) -> None:
        """Materialise a verified blob as the new file ``to``. Raises NotFound or Corrupt, which name the blob, the file and its
        ``owner``, such as an artifact."""

        def read(path: str) -> str | None:
            to.unlink(missing_ok=True)
            if self.backend.endpoint and entry.size <= _STREAMED:
                return self._stream(entry, to)
            self.backend.download(path, to)
            return self.problem(entry, to)

        self._checked(owner, entry, read)

    def read(self, owner: str, entry: FileEntry) -> bytes:
        """The verified content of a small blob. Raises as :meth:`get` does."""
        content = bytearray()

        def read(_: str) -> str | None:
            content.clear()
            return self._damage(entry, content.extend)

        self._checked(owner, entry, read)
        return bytes(content)

    def verify(self, owner: str, entry: FileEntry) -> None:
        """Read a blob where it lies. Raises as :meth:`get` does."""
        self._checked(owner, entry, lambda _: self._damage(entry))

    def _checked(self, owner: str, entry: FileEntry, read: Callable[[str], str | None]) -> None:
        name = f"blob sha256:{entry.sha256} (file {entry.path} of {owner})"
        try:
            # Verified twice: the bytes may have been damaged on their way here and be intact in the store.
            problem = read(blob_path(entry.sha256)) and read(blob_path(entry.sha256))
        except NotFound as error:
            raise NotFound(f"{self.backend.uri} has lost {name}; {MAKE_IT_AGAIN}") from error
        if problem:
            with contextlib.suppress(EnvironmentFault):  # a full disk has no room for the mark
                self.backend.put(suspect_path(entry.sha256), b"corrupt")
            raise Corrupt(f"{name} in {self.backend.uri} {problem}; {MAKE_IT_AGAIN}")

    def is_intact(self, entry: FileEntry) -> bool:
        """Whether the blob is there with the right size and no reader has found it corrupt. Reads no content."""
        stored = self.backend.stat(blob_path(entry.sha256))
        return (
            stored is not None and stored.size == entry.size and self.backend.stat(suspect_path(entry.sha256)) is None
        )

    def problem(self, entry: FileEntry, file: Path) -> str | None:
        """The problem of a local file that should be ``entry``; None when every byte is right."""
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if status.st_size != entry.size:
            return f"has {status.st_size} bytes instead of {entry.size}"
        identity = _identity(status)
        if self._verified.get(identity) != entry.sha256:
            actual = digest_of_file(file)
            if actual != entry.sha256:
                return f"has the digest {actual}"
            self._verified[identity] = entry.sha256
        return None

    def _is_damaged(self, entry: FileEntry, stored: Object) -> bool:
        """Compare an existing blob's size, and its bytes when a reader suspected them; a false alarm is cleared."""
        if stored.size != entry.size:
            return True
        if self.backend.stat(suspect_path(entry.sha256)) is None:
            return False
        try:
            if self._damage(entry):
                return True
        except NotFound:
            return False  # nothing to remove
        self.backend.delete(suspect_path(entry.sha256))
        return False

    def _stream(self, entry: FileEntry, to: Path) -> str | None:
        """Write a blob into the new read-only file ``to`` and hash it on the way; returns the problem, if there is one."""
        try:
            with explained("write", to), to.open("xb") as file:
                problem = self._damage(entry, file.write)
                os.fchmod(file.fileno(), 0o444)
        except NotFound:
            to.unlink(missing_ok=True)
            raise
        if problem is None:
            self._verified[_identity(to.lstat())] = entry.sha256
        return problem

    def _damage(self, entry: FileEntry, consume: Callable[[bytes], object] = lambda _: None) -> str | None:
        """The problem of a blob; None when every byte is right. ``consume`` gets the bytes in pieces. Raises NotFound."""
        digest, size = hashlib.sha256(), 0
        for chunk in self.backend.stream(blob_path(entry.sha256)):
            consume(chunk)
            digest.update(chunk)
            size += len(chunk)
        if size != entry.size:
            return f"has {size} bytes instead of {entry.size}"
        return None if digest.hexdigest() == entry.sha256 else f"has the digest {digest.hexdigest()}"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
