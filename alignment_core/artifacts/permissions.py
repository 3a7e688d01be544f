"""Files that can run code when they are read, such as pickled checkpoints: read only if a trusted user wrote them.

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
    """Create a directory that no other user can enter, or restrict an existing one; returns it.

    Raises EnvironmentFault if it belongs to another user.
    """
    with explained("create", directory):
        make_like_parent(directory.parent)
        while True:
            directory.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # its previous user has removed it just now
                status = directory.lstat()
                _check(directory, directory, status.st_uid)
                if status.st_mode & 0o077 and os.geteuid() in (status.st_uid, 0):
                    directory.chmod(0o700)
                return directory


def make_like_parent(directory: Path, scratch: Path | None = None) -> Path:
    """Create a missing directory. It belongs to the owner of its parent, even if root creates it, and the group may use it if
    the parent is shared with a group (``chmod g+ws``), whatever the umask.

    With ``scratch``, a folder of the same file system, it is renamed into place once its mode is set, so that no other user
    meets it before it is open to the group. Callers with ``scratch`` must exclude each other.
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
                with suppress(OSError):  # network file systems may map root to nobody
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
    """The tree, if trusted users own all of it. Otherwise raises EnvironmentFault, which names a file of another user."""
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
    if os.geteuid() == 0:  # the outermost store: other users could create one of theirs inside their own folders
        yield from [root.stat().st_uid for root in reversed(tree.parents) if (root / FORMAT).is_file()][:1]
    with suppress(OSError), tempfile.TemporaryFile(dir=tree.parent) as probe:
        yield os.fstat(probe.fileno()).st_uid  # this user as the file system sees it: NFS maps root to nobody
