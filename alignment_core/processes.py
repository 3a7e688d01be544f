"""Processes: identities that survive the reuse of process numbers, locks that end with a process, the environment that
child processes inherit, and their end with their parent."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

import psutil
from pydantic import BaseModel, ConfigDict

from alignment_core import network

UNSENT = ("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_POLL_SECONDS = 0.1
_OVER = ("Z", "X")
"""States of an ended process that its parent has not waited for yet."""


class ProcessId(BaseModel):
    """A process of one machine between two boots. Host name and clock are not part of it, since both may change."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int
    """Clock ticks from the machine's boot to the start of the process."""
    boot: str
    """Of the machine, and the process namespace in it that ``pid`` belongs to: a container has its own."""

    @classmethod
    def mine(cls) -> ProcessId:
        """This process."""
        return cls(pid=os.getpid(), started=_state(os.getpid())[1], boot=boot())

    def is_of_this_boot(self) -> bool:
        """Whether it is, or was, a process of this machine since its last boot, in whatever container."""
        return self.boot.partition(" ")[0] == boot_id()

    def lives(self) -> bool | None:
        """Whether it is alive; None if this process cannot know: on another machine, in another container, or of a user
        whose processes are hidden."""
        if self.boot != boot():
            return None
        try:
            state, started = _state(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return None if _is_hidden(self.pid) else False
        return started == self.started and state not in _OVER

    def find(self) -> psutil.Process | None:
        """The process, if it is there and this one can see it."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            process = psutil.Process(self.pid)
            if self.boot == boot() and _state(self.pid)[1] == self.started:
                return process
        return None


@cache
def boot_id() -> str:
    """Unique for this machine and boot; containers on the machine share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def boot() -> str:
    """This machine since its last boot, and this process's namespace of process numbers."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps a Python process, and all that it starts, from importing files of the working folder: one that is called like a
module of ours or of Python's own would be executed in its place."""


def inherited(**changes: str) -> dict[str, str]:
    """The environment that a child process inherits, with changes: everything except Prefect's variables, those that forbid it
    to send apart.

    They may hold a token or the password of a database, and below us runs anybody's code: reward functions, tokenizers,
    stages. Prefect's own processes, and the flows that its workers start, are told more: see :mod:`alignment.flows.access`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_") or name in UNSENT}
    return {**kept, **network.defaults(kept), **SAFE_PATH, **changes}


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal as soon as the thread that started it has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def lock(file: IO[bytes] | int) -> bool:
    """Lock an open file until it is closed, without waiting; False if another process has locked it."""
    return _locked(file, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of a file. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return not _locked(file, fcntl.LOCK_SH)


def _locked(file: IO[bytes] | int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true within so many seconds; it is polled."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process, though ``/proc`` does not show it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _state(pid: int) -> tuple[str, int]:
    """State and start of a process, fields 3 and 22 of proc_pid_stat(5)."""
    # the name, in brackets, may hold anything, brackets too
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return after_name[0], int(after_name[19])
