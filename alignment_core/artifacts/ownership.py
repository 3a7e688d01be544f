"""Files that code is read from, such as pickled checkpoints: only what this user or root wrote is read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from alignment_core.artifacts.faults import explained
from alignment_core.errors import EnvironmentFault


def make_private(directory: Path) -> Path:
    """Create a directory that nobody else can enter, or make an existing one so; the directory.

    Raises EnvironmentFault if it belongs to somebody else.
    """
    with explained("create", directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        while True:
            directory.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # somebody who had it before has removed it just now
                found = directory.lstat()
                _check(directory, found.st_uid)
                if found.st_uid == os.geteuid() and found.st_mode & 0o077:
                    directory.chmod(0o700)
                return directory


def check_ours(tree: Path) -> Path:
    """The tree, if all that is in it was written by this user or root. Raises EnvironmentFault that names what was not."""
    with explained("look at", tree):
        for path in (tree, *tree.rglob("*")):
            _check(path, path.lstat().st_uid)
    return tree


def _check(path: Path, owner: int) -> None:
    if owner not in (os.geteuid(), 0):
        raise EnvironmentFault(
            f"{path} belongs to user {owner}, and what somebody else wrote there is not read, because it could run code: "
            "remove it, or use a store of your own"
        )
