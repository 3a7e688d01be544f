"""The local side of a store: the verified cache, in-stage progress, and temporary directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment_core.artifacts.faults import explained
from alignment_core.artifacts.paths import CACHE, PROGRESS, TEMPORARY, check_key

_LOCK = "lock"


class Workspace:
    """Directories on this machine's file system; for a folder store they lie inside the store's own root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / CACHE
        self.temporary = root / TEMPORARY
        self.all_progress = root / PROGRESS
        for directory in (self.cache, self.temporary, self.all_progress):
            with explained("create", directory):
                directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A fresh directory, removed at the end. Its lock tells the collector whether the owner still lives."""
        with explained("create a temporary directory in", self.temporary):
            holder = Path(tempfile.mkdtemp(prefix="scratch-", dir=self.temporary))
            fresh = holder / "files"
            fresh.mkdir()
            lock = (holder / _LOCK).open("wb")
        try:
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield fresh
        finally:
            remove_tree(holder)

    def progress(self, key: str) -> Path:
        directory = self.all_progress / check_key(key)
        with explained("create", directory):
            directory.mkdir(exist_ok=True)
        return directory

    @contextmanager
    def claim(self, key: str, waits: Callable[[str | None], None], who: str) -> Iterator[Path]:
        """The progress directory of a key for this caller alone, until it is done or dies; see :meth:`Store.claim`."""
        waiting = False
        while True:
            directory = self.progress(key)
            try:
                opened = (directory / _LOCK).open("a+")
            except FileNotFoundError:
                continue  # as below, a moment earlier
            with opened as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waiting = True
                    lock.seek(0)
                    waits(f"the same stage in {lock.read() or 'another run'}")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not _names(directory / _LOCK, lock.fileno()):
                    continue  # its holder finished, and the directory went with it
                lock.truncate(0)
                lock.write(who)
                lock.flush()
                if waiting:
                    waits(None)
                yield directory
                return

    @contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Claim the progress directory of a key without waiting; False where somebody else has it, or it is gone."""
        path = self.all_progress / check_key(key) / _LOCK
        with contextlib.ExitStack() as stack:
            free = False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
                lock = stack.enter_context(path.open("ab"))  # without truncation, which would renew its time
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = _names(path, lock.fileno())
            yield free

    def drop_progress(self, key: str) -> None:
        self.discard(self.all_progress / check_key(key))

    def discard(self, tree: Path) -> None:
        """Remove a tree so that no other process sees a part of it under its name."""
        with self.scratch() as fresh, explained("remove", tree):
            with contextlib.suppress(PermissionError, FileNotFoundError):
                tree.chmod(0o755)  # moving a directory takes write permission on it
            with contextlib.suppress(FileNotFoundError):
                os.rename(tree, fresh / "discarded")


def _names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is still the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def adopt_tree(fresh: Path, final: Path) -> None:
    """Give a complete tree its final name, read-only; when another process was faster, its tree stands."""
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
        final.chmod(0o555)


def remove_tree(tree: Path) -> None:
    """Remove a file or a tree, read-only directories included. What is gone already is no error."""
    if not tree.is_dir() or tree.is_symlink():
        tree.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(tree):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(directory, 0o755)
    shutil.rmtree(tree, ignore_errors=True)


def files_below(tree: Path) -> dict[str, os.stat_result]:
    """All that is not a directory below ``tree``, by relative POSIX path; what vanishes meanwhile is left out."""
    found = {}
    for directory, _, names in os.walk(tree):
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                found[path.relative_to(tree).as_posix()] = path.lstat()
    return found


def time_and_size(tree: Path) -> tuple[float, int]:
    """When anything in a tree (or a single file) last changed, and the bytes that removing it frees.

    Raises FileNotFoundError.
    """
    files = list(files_below(tree).values()) if tree.is_dir() else [tree.lstat()]
    newest = max(found.st_mtime for found in [*files, tree.lstat()])
    return newest, sum(found.st_size for found in files if found.st_nlink == 1)


def in_use(holder: Path) -> bool:
    """Whether the process that opened this scratch directory still lives."""
    try:
        with (holder / _LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
