"""Files that code is read from, such as pickled checkpoints: read only if a user that we trust wrote them.

Trusted are this user, root and, by root alone, the owner of the store: a container may run as root over a user's folder.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from alignment_core.artifacts.group_access import is_shared, open_directory_to_group
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import FORMAT
from alignment_core.errors import EnvironmentFault


def make_private(directory: Path) -> Path:
    """Create a directory that nobody else can enter, or make an existing one so; the directory.

    Raises EnvironmentFault if it belongs to somebody else.
    """
    with explained("create", directory):
        make_like_parent(directory.parent)
        while True:
            directory.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # somebody who had it before has removed it just now
                status = directory.lstat()
                _check(directory, directory, status.st_uid)
                if status.st_mode & 0o077 and os.geteuid() in (status.st_uid, 0):
                    directory.chmod(0o700)
                return directory


def make_like_parent(directory: Path, scratch: Path | None = None) -> Path:
    """Create a directory, if it is missing, that belongs to the owner of its parent, also where root does it first, and that
    the group may use if the parent was given to one (``chmod g+ws``), whatever the umask.

    With ``scratch``, a folder of the same file system, it is complete when it gets its name, so that no other user meets it
    before it is open to the group. Callers with one exclude each other.
    """
    if directory.is_dir():
        return directory
    if not directory.parent.exists():
        make_like_parent(directory.parent)
    parent = directory.parent.stat()
    fresh = scratch / f"directory-{uuid.uuid4().hex}" if scratch is not None else directory
    with suppress(FileExistsError):
        fresh.mkdir()
        descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if is_shared(parent):
                open_directory_to_group(descriptor)
            if os.geteuid() == 0:
                with suppress(OSError):  # such as on a network file system, where root is nobody
                    os.fchown(descriptor, parent.st_uid, parent.st_gid)
        finally:
            os.close(descriptor)
    if scratch is not None:
        os.rename(fresh, directory)
    return directory


def belongs_to_another(tree: Path) -> bool:
    """Whether a user that is not trusted owns a directory."""
    with suppress(FileNotFoundError):
        return tree.lstat().st_uid not in _trusted(tree)
    return False


def check_ours(tree: Path) -> Path:
    """The tree, if all that is in it was written by trusted users. Raises EnvironmentFault that names what was not."""
    with explained("access", tree):
        owners = {path.lstat().st_uid: path for path in (tree, *tree.rglob("*"))}
    for owner, path in owners.items():
        _check(path, tree, owner)
    return tree


def _check(path: Path, tree: Path, owner: int) -> None:
    if owner not in _trusted(tree):
        raise EnvironmentFault(
            f"{path} belongs to user {owner}; files of another user are not read, because they could run code: "
            "remove it, or use a store of your own"
        )


def _trusted(tree: Path) -> Iterator[int]:
    yield os.geteuid()
    yield 0
    if os.geteuid() == 0:  # the outermost one: a stranger could put a store of his own into what he owns
        yield from [root.stat().st_uid for root in reversed(tree.parents) if (root / FORMAT).is_file()][:1]
    with suppress(OSError), tempfile.TemporaryFile(dir=tree.parent) as mine:
        yield os.fstat(mine.fileno()).st_uid  # this user as the file system has it: NFS calls root nobody
