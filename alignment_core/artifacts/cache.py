"""The verified cache of a store on this machine; for a store elsewhere it is bounded, and artifacts in use are kept.

A user of an artifact holds a kernel lock on a file beside the cache, which ends with its process. When room is needed, the
least recently used artifacts are evicted, except locked ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from alignment_core.artifacts.blobs import Blobs
from alignment_core.artifacts.folder import FolderBackend, may_write
from alignment_core.artifacts.manifest import Manifest
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import HOLDS, blob_path
from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.workspace import (
    Workspace,
    adopt_tree,
    entries,
    files_below,
    names,
    open_lock,
    time_and_size,
)
from alignment_core.errors import EnvironmentFault, StoreError, UserError
from alignment_core.heartbeat import beating

log = logging.getLogger(__name__)

BOUND = "ALIGN_CACHE_GIB"
LARGE = 100 << 20
"""Bytes of an artifact whose second copy on a disk is worth a warning."""
_ATTEMPTS = 5  # another process may evict or discard the folder at the same moment
_THREADS = 8
_warned: set[str] = set()


class Cache:
    """Verified copies of a store's artifacts on this machine, each a folder named by its digest."""

    def __init__(self, blobs: Blobs, workspace: Workspace, bounded: bool) -> None:
        self.blobs = blobs
        self.workspace = workspace
        self.bounded = bounded

    def folder(self, digest: str) -> Path:
        """Where the artifact is, or would be."""
        return self.workspace.cache / digest

    def hold(self, digest: str, until: ExitStack) -> None:
        """Keep the artifact from eviction until that is closed, or this process ends; it need not be there yet."""
        # A user who may not write to this cache cannot evict from it either, and needs no lock.
        with contextlib.suppress(EnvironmentFault, OSError):
            while True:
                lock = self._open(digest)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if names(self._path(digest), lock.fileno()):
                    until.callback(lock.close)
                    return
                lock.close()  # evicted between open and lock

    def fetch(self, manifest: Manifest) -> Path:
        """The folder with an artifact's files, every byte verified. Raises as :meth:`Blobs.get` does."""
        folder = self.folder(manifest.digest)
        for _ in range(_ATTEMPTS):
            if folder.is_dir():
                if self._is_whole(manifest, folder):
                    self._copy_writable_links(manifest)
                    with contextlib.suppress(OSError):  # users who may only read the cache cannot evict from it
                        os.utime(folder)  # the collector and evictions go by this time
                    return folder
                self.workspace.discard(folder)
            self._materialise(manifest, folder)
        raise StoreError(f"{folder} changed while it was read: is something else writing to the cache?")

    def make_room(self, size: int) -> None:
        """Evict until ``size`` more bytes fit into the bound and onto the disk, or nothing more can be evicted."""
        if not self.bounded:
            return
        copies = []
        for tree in entries(self.workspace.cache):
            with contextlib.suppress(FileNotFoundError):
                copies.append((tree.lstat().st_mtime, time_and_size(tree)[1], tree.name))
        disk = shutil.disk_usage(self.workspace.root)
        excess = max(sum(size for _, size, _ in copies) + size - bound(disk.total), size - disk.free)
        for _, freed, digest in sorted(copies):
            if excess <= 0:
                return
            if self.evict(digest):
                excess -= freed

    def keep(self, digest: str, directory: Path) -> None:
        """Take an artifact that was published from a temporary folder of this machine into the cache by hard links."""
        if not self.bounded or not directory.is_relative_to(self.workspace.temporary):
            return
        with contextlib.suppress(OSError, EnvironmentFault), self.workspace.scratch() as scratch:
            fresh = scratch / "artifact"
            shutil.copytree(directory, fresh, copy_function=_link)
            make_like_parent(self.workspace.cache)
            adopt_tree(fresh, self.folder(digest))

    def evict(self, digest: str) -> bool:
        """Remove an artifact from the cache; False, without effect, while a process holds it."""
        with contextlib.suppress(BlockingIOError, FileNotFoundError), self._exclusive(digest):
            self.workspace.discard(self.folder(digest))
            self._path(digest).unlink()
            return True
        return False

    def _materialise(self, manifest: Manifest, folder: Path) -> None:
        """Build the verified folder under a temporary name and move it into place in one step."""
        self.make_room(manifest.size)
        with self.workspace.scratch() as scratch:
            fresh = scratch / "artifact"
            with explained("write", fresh):
                make_like_parent(self.workspace.cache)
                for entry in manifest.files:
                    (fresh / entry.path).parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(
                    beating(
                        pool.map(lambda e: self.blobs.get(manifest.reference.short, e, fresh / e.path), manifest.files)
                    )
                )
            adopt_tree(fresh, folder)
        if isinstance(self.blobs.backend, FolderBackend) and not self.bounded and manifest.size >= LARGE:
            warn_of_copy(self.blobs.backend, manifest)

    def _is_whole(self, manifest: Manifest, folder: Path) -> bool:
        """Whether a folder holds exactly the manifest's files."""
        if set(files_below(folder)) != {entry.path for entry in manifest.files}:
            return False
        with ThreadPoolExecutor(_THREADS) as pool:
            return not any(list(pool.map(lambda e: self.blobs.problem(e, folder / e.path), manifest.files)))

    def _copy_writable_links(self, manifest: Manifest) -> None:
        """Replace hard links through which this user could write into the store by copies; on a full disk they stay."""
        links = self.writable_links(manifest.digest)
        for entry in manifest.files:
            if entry.path in links:
                with contextlib.suppress(OSError, EnvironmentFault), self.workspace.scratch() as scratch:
                    shutil.copyfile(self.folder(manifest.digest) / entry.path, scratch / "file")
                    (scratch / "file").chmod(0o444)
                    if self.blobs.problem(entry, scratch / "file") is None:
                        self._replace(manifest.digest, entry.path, scratch / "file")

    def writable_links(self, digest: str) -> list[str]:
        """Files of a cached artifact that are hard links to the store's own files and that this user, such as root, may write
        to."""
        folder = self.folder(digest)
        linked = [] if self.bounded else [path for path, status in files_below(folder).items() if status.st_nlink > 1]
        return [path for path in linked if may_write(folder / path)]

    def _replace(self, digest: str, path: str, copy: Path) -> None:
        """Replace a file of an artifact by a copy atomically; readers see the same bytes before and after."""
        opened = os.open(self.folder(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.replace(copy, path, dst_dir_fd=opened)
        finally:
            os.close(opened)

    @contextmanager
    def _exclusive(self, digest: str) -> Iterator[None]:
        """Lock an artifact of the cache. Raises BlockingIOError if a process uses it."""
        with self._open(digest) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not names(self._path(digest), lock.fileno()):
                raise BlockingIOError
            yield

    def _open(self, digest: str) -> BinaryIO:
        path = self._path(digest)
        with explained("lock", path):
            make_like_parent(path.parent)
            return open_lock(path)

    def _path(self, digest: str) -> Path:
        return self.workspace.root / HOLDS / digest


def warn_of_copy(backend: FolderBackend, manifest: Manifest) -> None:
    """Warn, once in a process, that a large artifact takes its disk space twice, and why."""
    reason = backend.why_copied(blob_path(max(manifest.files, key=lambda entry: entry.size).sha256))
    if reason and backend.uri not in _warned:
        _warned.add(backend.uri)
        log.warning(
            "%s takes %.2f GiB a second time in %s, for the copy that is used: %s; `align artifacts gc --delete "
            "--cache-days 0` frees the copies that nothing uses",
            manifest.reference.short,
            manifest.size / 2**30,
            backend.uri,
            reason,
        )


def bound(disk: int) -> float:
    """Bytes that the cache may take: ``$ALIGN_CACHE_GIB``, or half of ``disk``. Raises UserError if that is not a number."""
    text = os.environ.get(BOUND)
    if not text:
        return disk / 2
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not gib >= 0:
        raise UserError(f"{BOUND} is {text!r}: give the size of the cache in GiB, such as 200")
    return gib * 2**30


def _link(source: str, target: str) -> None:
    os.link(source, target)
    os.chmod(target, 0o444)
