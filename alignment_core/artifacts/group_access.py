"""Access of a group to a store that several users share: a folder with the setgid bit and group write (``chmod g+ws``).

The umask of one user must not keep the others out, so directories get the group's bits whatever it is.
"""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
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


def open_directory_to_group(directory: Path) -> None:
    """Let the group of a directory list it, enter it and write into it; what is made in it belongs to the group, too."""
    directory.chmod(stat.S_IMODE(directory.stat().st_mode) | _DIRECTORY)


def open_lock_to_others(lock: int, directory: Path) -> None:
    """Let other users take a lock file that this user owns: all may read it, and the group of a shared directory may write."""
    found = os.fstat(lock)
    wanted = 0o644 | (_LOCK if is_shared(directory.stat()) else 0)
    if found.st_mode & wanted != wanted and os.geteuid() in (found.st_uid, 0):
        with suppress(OSError):  # such as a read-only file system
            os.fchmod(lock, stat.S_IMODE(found.st_mode) | wanted)


def open_to_group(root: Path, files: bool = False) -> list[Closed]:
    """Open what this user has in a shared store to its group, as far as it is closed; what other users have to open.

    Looks at directories and locks; with ``files`` at every object, too, which takes longer.
    """
    closed = []
    with suppress(OSError):
        store = root.stat()
        for path, found, wanted in _entries(root, files) if is_shared(store) else ():
            of_another_group = found.st_gid != store.st_gid
            if found.st_mode & wanted == wanted and not of_another_group:
                continue
            try:
                if of_another_group:
                    os.chown(path, -1, store.st_gid, follow_symlinks=False)
                path.chmod(stat.S_IMODE(found.st_mode) | wanted)
            except FileNotFoundError:
                continue
            except OSError:
                command = f"align store doctor --store {shlex.quote(str(root))}"
                closed.append(Closed(path, _user(found.st_uid), command))
    return closed


def warn_of_closed(root: Path) -> None:
    """Open what is this user's; warn, once in a process, of what other users have to open."""
    closed = open_to_group(root)
    if closed and root not in _warned:
        _warned.add(root)
        owners = ", ".join(sorted({one.owner for one in closed}))
        log.warning(
            "%s in %s %s closed to the group, so that commands fail; any command of the owner (%s) on this store opens them, "
            "such as `%s`, which also lists them",
            f"{len(closed)} directories or locks" if len(closed) > 1 else closed[0].path.relative_to(root),
            root,
            "are" if len(closed) > 1 else "is",
            owners,
            closed[0].command,
        )


def _entries(root: Path, files: bool) -> Iterator[tuple[Path, os.stat_result, int]]:
    """What the group has to use, how it is, and the bits that this takes; directories come before what lies in them."""
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:  # another user's, and closed, which is said of it; or gone
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                wanted = _DIRECTORY
                # The folders of blobs and manifests hold thousands of files, and no folder.
                if path.parent != root or entry.name not in _PRIVATE:
                    waiting += [path] if files or directory.name != "sha256" else []
            elif not entry.is_file(follow_symlinks=False):
                continue
            elif path == root / LOCK or directory == root / HOLDS.rstrip("/"):
                wanted = _LOCK
            elif files:
                wanted = stat.S_IRGRP
            else:
                continue
            with suppress(FileNotFoundError):
                yield path, entry.stat(follow_symlinks=False), wanted


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
