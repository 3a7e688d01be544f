"""Runs a command so that none of its descendants outlives the process that started this one, however that ends.

``python -m alignment_core.host.supervisor LIFELINE_FD FOLDER FDS GRACE ORPHAN_GRACE [--restart] COMMAND …``.
FOLDER contains the command's temporary files and is removed at the end; FDS are the file descriptors that the command inherits,
separated by commas. The parent holds the write end of the lifeline pipe; when it dies in any way, the read end here reports
end-of-file. Then the command gets SIGTERM and has GRACE seconds to save its work, during which its children keep running; its
surviving children, such as a worker's runs, get SIGTERM and have ORPHAN_GRACE seconds. Both are longer if the command noted in
FOLDER that it needs longer (``stop_time.py``). All remaining descendants are killed.
This process is a sub-reaper, so that daemons that detach themselves, such as Ray's, become its children.

With ``--restart``, a command that exits is started again after a pause, and its children keep running: the exit of a worker
does not end its runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from alignment_core.stop_time import extended

IN_USE = "in-use"
"""Name of the file in FOLDER that this process locks while it runs."""
RESTART = "--restart"
RESTARTS = "restarts"
"""Name of the file in FOLDER with the number of restarts so far."""
PR_SET_CHILD_SUBREAPER = 36
TERM_SECONDS = 8.0
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Pause before a restart, which doubles while the command keeps exiting."""
HEALTHY_SECONDS = 60.0
"""Run time after which the pause is the shortest again."""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code, or 143 if it was ended from outside."""
    lifeline = int(arguments[0])
    folder = arguments[1]
    command = arguments[5:]
    restarts = None
    if command[0] == RESTART:
        command, restarts = command[1:], Path(folder, RESTARTS)
    grace = float(arguments[3])
    orphan_grace = float(arguments[4])
    inherited = [int(number) for number in arguments[2].split(",") if number]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(lifeline, False)
    with open(os.path.join(folder, IN_USE), "wb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        code = _supervise(command, inherited, lifeline, Path(folder), grace, orphan_grace, restarts)
    discard(folder)
    return 143 if code is None else code if code >= 0 else 128 - code


def discard(folder: str | Path) -> None:
    """Remove a command's folder, and the mark last: if a dying daemon still writes into the folder, the mark has to stay,
    because later sweeps recognise our folders by it."""
    with contextlib.suppress(OSError):
        for entry in Path(folder).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != IN_USE:
                entry.unlink(missing_ok=True)
        if set(os.listdir(folder)) <= {IN_USE}:
            shutil.rmtree(folder)


def _supervise(
    command: list[str],
    inherited: list[int],
    lifeline: int,
    folder: Path,
    grace: float,
    orphan_grace: float,
    restarts: Path | None,
) -> int | None:
    """The command's exit code, negative for a signal; None if it was ended from outside. No descendant is left.

    With ``restarts``, the file for the number of restarts, only the lifeline or SIGTERM ends it.
    """
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    child = _start(command, inherited)
    restart = None if restarts is None else _Restart(command, inherited, restarts)
    for number in inherited if restart is None else ():
        os.close(number)  # so that the other side sees end-of-file when the command ends
    while not stopping and not _is_cut(lifeline):
        _reap_all_but(child.pid)
        if child.poll() is not None:
            if restart is None:
                break
            child = restart.when_due(child)
    code = child.poll()
    if code is None:
        _terminate_children(extended(grace, folder))
    if child.poll() is not None:  # a command that ignores SIGTERM still owns its children
        _terminate_children(extended(orphan_grace, folder))
    _end_descendants()
    return code


def _start(command: list[str], inherited: list[int]) -> subprocess.Popen[bytes]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a command that inherits SIG_IGN could not handle it
    child = subprocess.Popen(command, pass_fds=inherited)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    return child


class _Restart:
    """Restarts a command after a pause."""

    def __init__(self, command: list[str], inherited: list[int], file: Path) -> None:
        self._command = command
        self._inherited = inherited
        self._file = file
        self._number = 0
        self._pause = FIRST_PAUSE_SECONDS / 2
        self._due = 0.0
        self._started = time.monotonic()
        self._pending = False

    def when_due(self, ended: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """The new process, or the ended one until the restart is due."""
        now = time.monotonic()
        if not self._pending:
            healthy = now - self._started > HEALTHY_SECONDS
            self._pause = FIRST_PAUSE_SECONDS if healthy else min(self._pause * 2, LONGEST_PAUSE_SECONDS)
            self._due = now + self._pause
            self._pending = True
            print(f"exit code {ended.returncode}; restart in {self._pause:g} s", flush=True)
        if now < self._due:
            return ended
        self._pending = False
        self._started = now
        self._number += 1
        with contextlib.suppress(OSError):  # a full disk
            self._file.write_text(str(self._number))
        return _start(self._command, self._inherited)


def _is_cut(lifeline: int) -> bool:
    """Whether the other end of the pipe is closed; waits up to the poll interval."""
    ready, _, _ = select.select([lifeline], [], [], POLL_SECONDS)
    return bool(ready) and os.read(lifeline, 1) == b""


def _terminate_children(grace: float) -> None:
    """Send SIGTERM to the direct children, the command or its orphans, and wait. Deeper descendants keep running."""
    children = psutil.Process().children()
    for process in children:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(children, timeout=grace)


def _end_descendants() -> None:
    """Send SIGTERM to all descendants, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for process in _descendants():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        deadline = time.monotonic() + seconds
        while _descendants() and time.monotonic() < deadline:
            _reap()
            time.sleep(0.05)


def _descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended after it was listed
        return False


def _reap_all_but(command: int) -> None:
    """Reap orphans that ended, because a command may run and leave orphans for months."""
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid != command:
            os.waitpid(ended.si_pid, 0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
