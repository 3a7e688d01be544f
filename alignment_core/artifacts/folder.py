"""The folder backend: a store in a directory, with POSIX links and renames for atomicity and fsync for durability."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.group_access import is_shared
from alignment_core.artifacts.os_errors import check_room, explained, possible
from alignment_core.artifacts.paths import LOCK, TEMPORARY, inside
from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.workspace import names, open_lock
from alignment_core.errors import EnvironmentFault, NotFound, StoreError

_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write
_CHUNK = 1 << 20
CLOCK_OF_FILES = 5
"""CLOCK_REALTIME_COARSE (linux/time.h), the kernel's clock for file times; some milliseconds behind the others."""


class FolderBackend:
    """Objects are files below ``root``. The file system must offer hard links (local disks and NFS do)."""

    few_writes = False

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._durable: set[Path] = set()  # directories whose entry in their parent this process has synced

    @property
    def uri(self) -> str:
        return str(self.root)

    @property
    def endpoint(self) -> str:
        return ""

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        target = self._locate(path)
        with explained("write", target):
            self._make_directory(target.parent)
            if replaces is None and os.path.lexists(target):
                # Its writer may have been killed before this fsync, and the caller now relies on the name.
                _sync_directory(target.parent)
                return None
            # fsync of the bytes, then the name, then fsync of the name: after a power cut there is no name without its bytes,
            # and no acknowledged object without its name.
            if isinstance(source, Path) and replaces is None and self._is_scratch(source):
                _seal(source)
                moved = self._create(source, target)
            else:
                with self._temporary() as temporary:
                    _write(temporary, source)
                    moved = (
                        self._create(temporary, target)
                        if replaces is None
                        else self._replace(temporary, target, replaces)
                    )
            _sync_directory(target.parent)
            return moved

    def _is_scratch(self, file: Path) -> bool:
        """Whether a file has no name but one in a temporary folder of this store: its publisher wrote it for this store, and
        removes that name, so that it becomes the object and takes no space a second time."""
        return Path(os.path.realpath(file)).is_relative_to(self.root / TEMPORARY) and file.lstat().st_nlink == 1

    def _create(self, temporary: Path, target: Path) -> str | None:
        try:
            os.link(temporary, target)  # atomic and exclusive, unlike a rename
        except FileExistsError:
            return None
        return _version(temporary.lstat())

    def _replace(self, temporary: Path, target: Path, version: str) -> str | None:
        with self._exclusive():
            try:
                if _version(target.lstat()) != version:
                    return None
            except FileNotFoundError:
                return None
            new_version = _version(temporary.lstat())
            os.rename(temporary, target)
            return new_version

    def read(self, path: str) -> bytes:
        target = self._locate(path)
        with explained("read", target):
            return target.read_bytes()

    def stream(self, path: str) -> Iterator[bytes]:
        target = self._locate(path)
        with explained("read", target), target.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def download(self, path: str, destination: Path) -> None:
        """By reflink (copy on write) if the file system supports it; by hard link if the file's mode keeps this user, unlike
        root, from writing into it; otherwise by copy."""
        source = self._locate(path)
        with explained("materialise", destination):
            if not _clone(source, destination):
                destination.unlink()
                if not may_write(source) and _link(source, destination):
                    return
                _copy(source, destination)
            destination.chmod(0o444)

    def why_copied(self, path: str) -> str:
        """Why an object takes its space a second time when it is fetched into this folder; empty if it does not."""
        source = self._locate(path)
        with explained("link", source), self._temporary() as temporary:
            if _clone(source, temporary):
                return ""
            if may_write(source):
                return (
                    "the file system has no reflinks, and this user, such as root, may write into read-only files, so that a "
                    "hard link would not protect the store"
                )
            link = temporary.with_name(f"{temporary.name}-link")
            if _link(source, link):
                link.unlink()
                return ""
            return "the file system has no reflinks, and does not let this user make a hard link to the store's file"

    def stat(self, path: str) -> Object | None:
        target = self._locate(path)
        try:
            with explained("access", target):
                status = target.lstat()
        except NotFound:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{target} is not a regular file: something else wrote into the store")
        return Object(path, status.st_size, status.st_mtime, _version(status))

    def list(self, prefix: str) -> Iterator[Object]:
        return self._walk(self._locate(prefix.removesuffix("/")) if prefix else self.root)

    def delete(self, path: str, version: str | None = None) -> None:
        target = self._locate(path)
        with explained("delete", target):
            if not os.path.lexists(target):
                return
            with self._exclusive(), contextlib.suppress(FileNotFoundError):
                if version in (None, _version(target.lstat())):
                    target.unlink()
                    _sync_directory(target.parent)

    def now(self) -> float:
        """The time that the file system gives to a new file; this machine's time if nothing can be written."""
        if not (self.root / TEMPORARY).is_dir():
            return time.clock_gettime(CLOCK_OF_FILES)
        try:
            with explained("create a temporary file in", self.root), self._temporary() as temporary:
                return temporary.stat().st_mtime
        except EnvironmentFault:
            return time.clock_gettime(CLOCK_OF_FILES)

    def unfinished(self) -> Iterator[Object]:
        """None: killed writers leave locked files in ``tmp/``, which are collected as temporary files."""
        yield from ()

    def drop(self, upload: Object) -> None:
        raise StoreError(f"{self.uri} has no upload {upload.path}")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude other replacements and deletions: POSIX has no compare-and-rename."""
        with open_lock(self.root / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A temporary file, removed at the end. Its lock keeps the collector away while the writer is alive."""
        self._make_directory(self.root / TEMPORARY)
        while True:
            path = self.root / TEMPORARY / f"put-{uuid.uuid4().hex}"
            with path.open("xb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    if names(path, file.fileno()):  # otherwise a collector removed it before it was locked
                        yield path
                        return
                finally:
                    path.unlink(missing_ok=True)

    def _walk(self, directory: Path) -> Iterator[Object]:
        """The objects of a directory. Files are opened relative to it, which is faster for ten thousand of them."""
        try:
            with explained("list", directory), _open_directory(directory) as opened, os.scandir(opened) as scan:
                entries = sorted(scan, key=attrgetter("name"))
                below = str(directory.relative_to(self.root)) + "/" if directory != self.root else ""
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._walk(directory / entry.name)
                    elif entry.is_file(follow_symlinks=False) and (path := below + entry.name) != LOCK:
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:  # deleted since the scan
                            continue
                        yield Object(path, status.st_size, status.st_mtime, _version(status))
        except NotFound:
            return

    def _locate(self, path: str) -> Path:
        target = self.root / inside(self.uri, path)
        if not Path(os.path.realpath(target.parent)).is_relative_to(self.root):
            raise StoreError(f"{target} leads out of the store at {self.root} through a symbolic link")
        return target

    def _make_directory(self, directory: Path) -> None:
        """Create ``directory`` so that it survives power loss, whichever process created its parents."""
        if directory in self._durable:
            return
        if directory != self.root:
            self._make_directory(directory.parent)
            temporary = self.root / TEMPORARY
            if directory != temporary and not directory.is_dir() and is_shared(directory.parent.stat()):
                self._make_directory(temporary)
                with self._exclusive():
                    make_like_parent(directory, scratch=temporary)
            else:
                make_like_parent(directory)
            _sync_directory(directory.parent)
        elif not directory.is_dir():
            make_like_parent(directory)
            _sync_directory(directory.parent)
        self._durable.add(directory)


def may_write(file: Path) -> bool:
    """Whether this user may write into a file, whatever its mode says of its owner; root may into most."""
    return os.access(file, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _write(path: Path, source: bytes | Path) -> None:
    """Fill an empty file, make it read-only and force it to the disk."""
    if isinstance(source, bytes):
        path.write_bytes(source)
    elif not _clone(source, path):
        _copy(source, path)
    _seal(path)


def _seal(path: Path) -> None:
    """Make a file read-only and force it to the disk."""
    with path.open("rb") as file:
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


def _copy(source: Path, destination: Path) -> None:
    """Copy a file. Raises EnvironmentFault before anything is written if it does not fit."""
    check_room(destination.parent, source.stat().st_size, source.name)
    shutil.copyfile(source, destination)


def _clone(source: Path, destination: Path) -> bool:
    """Reflink ``source`` to ``destination``, a new or empty file; False if that is impossible."""
    return possible(lambda: _reflink(source, destination))


def _link(source: Path, destination: Path) -> bool:
    """Hard-link ``source`` to the new file ``destination``; False if that is impossible."""
    return possible(lambda: os.link(source, destination, follow_symlinks=False))


def _reflink(source: Path, destination: Path) -> None:
    with source.open("rb") as old, destination.open("wb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())


def _sync_directory(directory: Path) -> None:
    with _open_directory(directory) as opened:
        os.fsync(opened)


@contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
