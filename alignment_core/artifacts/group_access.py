"""Access of a group to a store that several users share: a folder with the setgid bit and group write (``chmod g+ws``).

The umask of one user must not keep the others out, so directories get the group's bits whatever it is.
"""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from alignment_core.artifacts.paths import CACHE, HOLDS, LOCK, PROGRESS, TEMPORARY

log = logging.getLogger(__name__)

_SHARED = stat.S_ISGID | stat.S_IWGRP
_DIRECTORY = stat.S_ISGID | stat.S_IRWXG
_LOCK = stat.S_IRGRP | stat.S_IWGRP
_PRIVATE = {name.rstrip("/") for name in (CACHE, PROGRESS, TEMPORARY)}
"""Folders whose subfolders have one owner: read-only copies, checkpoints and scratch space."""
_warned: set[Path] = set()


class Closed(NamedTuple):
    """A directory or file of a shared store that its group cannot use, and that another user has to open."""

    path: Path
    owner: str
    command: str
    """What the owner has to run."""


def is_shared(directory: os.stat_result) -> bool:
    """Whether a directory was given to a group (``chmod g+ws``)."""
    return directory.st_mode & _SHARED == _SHARED


def open_directory_to_group(directory: int) -> None:
    """Give the group of an open directory read, write and search permission; new entries inherit the group."""
    os.fchmod(directory, stat.S_IMODE(os.fstat(directory).st_mode) | _DIRECTORY)


def open_lock_to_others(lock: int, directory: Path) -> None:
    """Let other users lock a file that this user owns: everyone may read it, and the group of a shared directory may write."""
    status = os.fstat(lock)
    wanted = 0o644 | (_LOCK if is_shared(directory.stat()) else 0)
    # A member of the group could link another file of this user here, whose mode must not change: hence one link only.
    if status.st_mode & wanted != wanted and status.st_nlink == 1 and os.geteuid() in (status.st_uid, 0):
        with suppress(OSError):  # such as a read-only file system
            os.fchmod(lock, stat.S_IMODE(status.st_mode) | wanted)


def open_to_group(root: Path, files: bool = False) -> list[Closed]:
    """Give the group access to this user's part of a shared store; returns the parts that other users must open.

    Looks at directories and locks; with ``files`` at every object, too, which takes longer. Follows no link: a member of the
    group could put one where a directory was.
    """
    closed: list[Closed] = []
    with suppress(OSError):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            status = os.fstat(descriptor)
            if is_shared(status):
                _Walk(root, status.st_gid, files, closed).open_below(descriptor, root)
        finally:
            os.close(descriptor)
    return closed


class _Walk(NamedTuple):
    """One walk through a shared store."""

    root: Path
    group: int
    files: bool
    closed: list[Closed]

    def open_below(self, descriptor: int, directory: Path) -> None:
        """Give access to the entries of an open directory and, recursively, of those below; ``directory`` is its path."""
        for entry in sorted(os.scandir(descriptor), key=lambda entry: entry.name):
            path = directory / entry.name
            with suppress(OSError):  # gone, replaced by a link, or closed, which is listed then
                status = entry.stat(follow_symlinks=False)
                wanted = self._wanted(path, status)
                if wanted and (status.st_mode & wanted != wanted or status.st_gid != self.group):
                    self._open_to_group(descriptor, path, status, wanted)
                if stat.S_ISDIR(status.st_mode) and self._may_hold_closed_ones(path):
                    opened = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                    try:
                        self.open_below(opened, path)
                    finally:
                        os.close(opened)

    def _wanted(self, path: Path, status: os.stat_result) -> int:
        """The mode bits that the group needs; 0 for entries that are skipped."""
        if stat.S_ISDIR(status.st_mode):
            return _DIRECTORY
        if not stat.S_ISREG(status.st_mode):
            return 0
        if path == self.root / LOCK or path.parent == self.root / HOLDS:
            return _LOCK
        return stat.S_IRGRP if self.files else 0

    def _may_hold_closed_ones(self, path: Path) -> bool:
        """The folders of blobs and manifests hold thousands of files, and no folder."""
        private = path.parent == self.root and path.name in _PRIVATE
        return not private and (self.files or path.parent.name != "sha256")

    def _open_to_group(self, directory: int, path: Path, status: os.stat_result, wanted: int) -> None:
        try:
            opened = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                status = os.fstat(opened)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    return  # it may be a hard link to a file elsewhere
                if status.st_gid != self.group:
                    os.fchown(opened, -1, self.group)
                os.fchmod(opened, stat.S_IMODE(status.st_mode) | wanted)
            finally:
                os.close(opened)
        except FileNotFoundError:
            return
        except OSError:
            command = f"align store doctor --store {shlex.quote(str(self.root))}"
            self.closed.append(Closed(path, _user(status.st_uid), command))


def warn_of_closed(root: Path) -> None:
    """Do what :func:`open_to_group` does when a store is opened; warn once per process of the parts of other users."""
    closed = open_to_group(root)
    if closed and root not in _warned:
        _warned.add(root)
        owners = ", ".join(sorted({part.owner for part in closed}))
        log.warning(
            "%s in %s %s closed to the group, so that commands fail; any command of the owner (%s) on this store opens them, "
            "such as `%s`, which also lists them",
            f"{len(closed)} directories or locks" if len(closed) > 1 else closed[0].path.relative_to(root),
            root,
            "are" if len(closed) > 1 else "is",
            owners,
            closed[0].command,
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
