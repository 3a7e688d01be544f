"""Whether a process of this machine lives: it holds a lock below ``ALIGN_HOME`` that the kernel takes from the dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
from functools import cache
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.faults import explained
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
        if self.home != _home(folder):
            return None
        try:
            with (folder / self.name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        with contextlib.suppress(OSError):
            (folder / self.name).unlink()  # nobody takes the name again
        return False


_guard = threading.Lock()
_mine: tuple[Process, BinaryIO] | None = None


def _begin() -> None:
    global _mine
    folder = _folder()
    process = Process(home=_home(folder), name=uuid.uuid4().hex)
    with explained("write", folder):
        file = (folder / process.name).open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
    _mine = process, file


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
        folder.mkdir(exist_ok=True)
    return folder


def _home(folder: Path) -> str:
    found = folder.stat()
    return f"{_boot()}-{found.st_dev:x}-{found.st_ino:x}"


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
