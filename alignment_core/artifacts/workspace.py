"""The local side of a store: the verified cache, in-stage progress, and temporary directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from alignment_core.artifacts.group_access import open_lock_to_others
from alignment_core.artifacts.os_errors import explained, possible
from alignment_core.artifacts.paths import CACHE, PROGRESS, TEMPORARY, check_key
from alignment_core.artifacts.permissions import belongs_to_another, make_like_parent, make_private
from alignment_core.canonical import digest_of
from alignment_core.errors import EnvironmentFault

_LOCK = "lock"
_FOR_LOCKING = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
"""For writing: NFS grants exclusive locks only on files that are open for writing."""
_SCRATCH, _DISCARD = "scratch-", "discard-"
_YOUNG_SECONDS = 60.0
"""Longer than a living process takes from creating a temporary directory to locking it."""


class Workspace:
    """Directories on this machine's file system, created at first use; for a folder store they lie inside the store's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / CACHE
        self.temporary = root / TEMPORARY
        self.all_progress = root / PROGRESS

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A fresh directory, removed at the end. Its lock keeps the collector away while the owner is alive."""
        holder, lock = self._locked_directory()
        try:
            with lock:
                fresh = holder / "files"
                with explained("create", fresh):
                    fresh.mkdir(mode=0o700)
                yield fresh
        finally:
            remove_tree(holder)

    def _locked_directory(self) -> tuple[Path, BinaryIO]:
        with explained("create a temporary directory in", self.temporary):
            make_like_parent(self.temporary)
            while True:
                holder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.temporary))
                try:
                    holder.chmod(0o755)  # other users' collectors must reach the lock, and nothing else
                    lock = (holder / _LOCK).open("wb")
                except OSError:
                    remove_tree(holder)
                    raise
                fcntl.flock(lock, fcntl.LOCK_EX)
                if names(holder / _LOCK, lock.fileno()):
                    return holder, lock
                lock.close()  # a collector removed it before it was locked

    def progress(self, key: str) -> Path:
        """The directory for in-stage checkpoints of a stage key, created when it is missing, for this user alone: checkpoints
        are pickled, and reading a pickle runs code. In a shared store each user has a directory of their own."""
        directory = self.all_progress / check_key(key)
        try:
            return make_private(directory)
        except EnvironmentFault:
            if not belongs_to_another(directory):
                raise
            return make_private(self._own_progress(key))

    @contextmanager
    def claim(
        self, key: str, waits: Callable[[str | None], None] = lambda _: None, claimant: str = ""
    ) -> Iterator[Path]:
        """The progress directory of a key for one caller of this machine at a time; the end of a process frees it.

        ``waits`` is called with a description of the holder when a wait begins, and with None when it is over; ``claimant``
        describes this caller to others.
        """
        waiting = False
        while True:
            directory = self.progress(key)
            try:
                opened = (directory / _LOCK).open("a+")
            except FileNotFoundError:
                continue  # removed between `progress` and `open`
            with opened as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waiting = True
                    lock.seek(0)
                    waits(f"the same stage in {lock.read() or 'another run'}")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not names(directory / _LOCK, lock.fileno()):
                    continue  # its holder finished, and the directory went with it
                lock.truncate(0)
                lock.write(claimant)
                lock.flush()
                if waiting:
                    waits(None)
                yield directory
                return

    @contextmanager
    def try_claim(self, name: str) -> Iterator[bool]:
        """Claim a progress directory without waiting; False if it is claimed, another user's, or gone."""
        path = self.all_progress / name / _LOCK
        check_key(key_of_progress(name))
        with contextlib.ExitStack() as stack:
            free = False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError, PermissionError):
                lock = stack.enter_context(path.open("ab"))  # without truncation, which would renew its time
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = names(path, lock.fileno())
            yield free

    def drop_progress(self, key: str) -> None:
        """Delete the in-stage checkpoints of a key, once its artifact is published; other users' checkpoints stay."""
        for directory in (self.all_progress / check_key(key), self._own_progress(key)):
            with contextlib.suppress(FileNotFoundError):
                if is_mine(directory):
                    self.discard(directory)

    def _own_progress(self, key: str) -> Path:
        """The directory of this user's checkpoints while another user owns the directory of the key."""
        return self.all_progress / f"{key}-{os.geteuid()}"

    def discard(self, tree: Path) -> None:
        """Remove a tree atomically: it is renamed first, which also works on a full disk, then deleted."""
        aside = self.temporary / f"{_DISCARD}{uuid.uuid4().hex}"
        with explained("remove", tree), contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(PermissionError):
                tree.chmod(0o755)  # moving a directory takes write permission on it
            os.rename(tree, aside)
        remove_tree(aside)


def key_of_progress(name: str) -> str:
    """The stage key of a progress directory."""
    return name.partition("-")[0]


def local_name(uri: str) -> str:
    """A readable and unique file name for a store on this machine."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", uri).strip("-")
    return f"{readable[:80]}-{digest_of(uri)[:8]}"


def open_lock(path: Path) -> BinaryIO:
    """Open a file in order to lock it, and create it if it is missing; other users may lock it, too, whatever the umask. It
    may be another user's, such as root's."""
    try:
        lock = os.open(path, _FOR_LOCKING)
    except FileNotFoundError:
        _create_lock(path)
        return open_lock(path)
    except PermissionError:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")  # enough for a lock on a local disk
    open_lock_to_others(lock, path.parent)
    return os.fdopen(lock, "ab")


def _create_lock(path: Path) -> None:
    """Give a lock its name only once it has its mode, as another user may open it at once; on file systems with hard links."""
    unnamed = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    lock = os.open(unnamed, _FOR_LOCKING | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        open_lock_to_others(lock, path.parent)
        with contextlib.suppress(FileExistsError):
            if not possible(lambda: os.link(unnamed, path)):  # exclusive, unlike a rename
                os.close(os.open(path, _FOR_LOCKING | os.O_CREAT, 0o666))
    finally:
        os.close(lock)
        unnamed.unlink()


def names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is still the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def entries(directory: Path) -> list[Path]:
    """The entries of a directory, sorted; none if it does not exist."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def is_mine(tree: Path) -> bool:
    """Whether this user owns a tree, or is root, and so may remove it. Raises FileNotFoundError."""
    return os.geteuid() in (tree.lstat().st_uid, 0)


def adopt_tree(fresh: Path, final: Path) -> None:
    """Rename a complete tree to its final name, read-only; when another process was faster, its tree stays."""
    directories = [Path(directory) for directory, _, _ in os.walk(fresh)]
    with explained("move into place", final):
        for directory in directories[1:]:
            directory.chmod(0o555)
        try:
            os.rename(fresh, final)
        except OSError:
            if final.is_dir():
                return
            raise
        final.chmod(0o555)  # after the rename, which needs write permission on the directory


def remove_tree(tree: Path) -> None:
    """Remove a file or a tree, read-only directories included. A missing one is not an error."""
    if not tree.is_dir() or tree.is_symlink():
        tree.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(tree):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.chmod(directory, 0o755)
    shutil.rmtree(tree, ignore_errors=True)


def files_below(tree: Path) -> dict[str, os.stat_result]:
    """The files below ``tree`` by relative POSIX path, except those that vanish meanwhile."""
    files = {}
    for directory, _, names in os.walk(tree):
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                files[path.relative_to(tree).as_posix()] = path.lstat()
    return files


def time_and_size(tree: Path) -> tuple[float, int]:
    """When anything in a tree (or a single file) last changed, and the bytes that removing it frees.

    Raises FileNotFoundError.
    """
    files = list(files_below(tree).values()) if tree.is_dir() else [tree.lstat()]
    newest = max(status.st_mtime for status in [*files, tree.lstat()])
    return newest, sum(status.st_size for status in files if status.st_nlink == 1)


@contextmanager
def abandoned(temporary: Path) -> Iterator[bool]:
    """Whether no living process uses an entry of the temporary directory; its lock is held within the ``with``.

    False if this user may not read the lock: the entry is left to its owner.
    """
    with contextlib.ExitStack() as stack:
        free = temporary.name.startswith(_DISCARD)
        try:
            lock = stack.enter_context((temporary / _LOCK if temporary.is_dir() else temporary).open("rb"))
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            pass
        except PermissionError:
            free = False
        except FileNotFoundError:  # its owner has not locked it yet, or died before that
            with contextlib.suppress(FileNotFoundError):
                free = free or time.time() - temporary.lstat().st_mtime > _YOUNG_SECONDS
        yield free
