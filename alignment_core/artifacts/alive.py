"""Whether a process of this machine lives: it holds a lock below ``ALIGN_HOME`` that the kernel takes from the dead."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
import time
import uuid
from functools import cache
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.faults import explained
from alignment_core.artifacts.ownership import make_like_parent
from alignment_core.home import align_home


class Process(BaseModel):
    """A process, as others may ask for it. ``home`` names a running machine and an ``ALIGN_HOME`` there."""

    model_config = ConfigDict(frozen=True)

    home: str = Field(description="boot of the machine, device and inode of its ALIGN_HOME")
    name: str = Field(description="name of the file that the process keeps locked")

    @classmethod
    def this(cls) -> Process:
        """The process that asks."""
        with _guard:
            if _mine is None:
                _begin()
            assert _mine is not None
            return _mine[0]

    def lives(self) -> bool | None:
        """None where this machine cannot know: the process belongs to another machine, or another ``ALIGN_HOME``."""
        folder = _folder()
        return _is_locked(folder / self.name) if self.home == _home(folder) else None


_NEW = "new-"
_YOUNG_SECONDS = 60.0
"""More than a living process needs from the making of its file to the lock on it."""
_guard = threading.Lock()
_mine: tuple[Process, BinaryIO] | None = None


def _begin() -> None:
    global _mine
    folder = _folder()
    for left in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            young = left.name.startswith(_NEW) and time.time() - left.stat().st_mtime < _YOUNG_SECONDS
            if not young and not _is_locked(left):
                left.unlink()  # of a process that was killed; nobody takes the name again
    process = Process(home=_home(folder), name=uuid.uuid4().hex)
    with explained("write", folder):
        new = folder / f"{_NEW}{process.name}"
        file = new.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(folder / process.name)  # so that under this name it is locked as long as the process lives
    _mine = process, file


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@atexit.register
def _end() -> None:
    if _mine is not None:
        with contextlib.suppress(OSError):
            (_folder() / _mine[0].name).unlink()


def _forget() -> None:
    """A forked child is a process of its own, and must not keep its parent alive."""
    global _mine, _guard
    _guard = threading.Lock()
    if _mine is not None:
        _mine[1].close()
        _mine = None


os.register_at_fork(after_in_child=_forget)


def _folder() -> Path:
    folder = align_home() / "alive"
    with explained("create", folder):
        return make_like_parent(folder)


def _home(folder: Path) -> str:
    found = folder.stat()
    return f"{_boot()}-{found.st_dev:x}-{found.st_ino:x}"


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
