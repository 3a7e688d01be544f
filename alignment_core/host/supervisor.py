"""Runs a command so that none of its descendants outlives the process that asked for it, whatever ends that process.

``python -m alignment_core.host.supervisor LIFELINE_FD FOLDER FDS GRACE ORPHAN_GRACE [--restart] COMMAND …``.
FOLDER holds the command's temporary files and goes at the end; FDS are the file descriptors that the command inherits, with
commas between them. The asking process holds the write end of the lifeline pipe; when it dies in any way, the read end here
reports end-of-file. Then the command is asked to end and has GRACE seconds to save its work while all that it started still
lives; what it leaves behind, or left when it died, is asked and has ORPHAN_GRACE seconds (a worker's runs, for example). What
is left after that is ended. This process is a sub-reaper, so that daemons that detach themselves (Ray's do) become its
children and are found.

With ``--restart``, a command that ends by itself is started again after a pause, and what it started keeps running: one exit
of a worker ends no run.
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

IN_USE = "in-use"
"""Name of the file in FOLDER whose lock says that this process lives."""
RESTART = "--restart"
RESTARTS = "restarts"
"""Name of the file in FOLDER with the number of restarts so far."""
PR_SET_CHILD_SUBREAPER = 36
TERM_SECONDS = 8.0
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before a restart; the pause doubles while the command keeps ending."""
HEALTHY_SECONDS = 60.0
"""A command that ran for so long restarts after the shortest pause."""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code, or 143 if it was ended from outside."""
    lifeline, folder, command = int(arguments[0]), arguments[1], arguments[5:]
    restarts = None
    if command[0] == RESTART:
        command, restarts = command[1:], Path(folder, RESTARTS)
    grace, orphan_grace = float(arguments[3]), float(arguments[4])
    inherited = [int(number) for number in arguments[2].split(",") if number]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(lifeline, False)
    with open(os.path.join(folder, IN_USE), "wb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        code = _supervise(command, inherited, lifeline, grace, orphan_grace, restarts)
    discard(folder)
    return 143 if code is None else code if code >= 0 else 128 - code


def discard(folder: str | Path) -> None:
    """Remove a command's folder. The mark goes last, and stays where a daemon that is dying still writes beside it: only
    by its mark does a later sweep know the folder for one of ours."""
    with contextlib.suppress(OSError):
        for entry in Path(folder).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != IN_USE:
                entry.unlink(missing_ok=True)
        if set(os.listdir(folder)) <= {IN_USE}:
            shutil.rmtree(folder)


def _supervise(
    command: list[str], inherited: list[int], lifeline: int, grace: float, orphan_grace: float, restarts: Path | None
) -> int | None:
    """The command's exit code, negative for a signal; none if it was ended from outside. Nothing of it is left then.

    With ``restarts``, a file for their number, it ends from outside alone.
    """
    asked_to_stop = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    child = _start(command, inherited)
    for number in inherited:
        os.close(number)  # so that the other side sees the end when the command ends
    restart = None if restarts is None else _Restart(command, restarts)
    while not asked_to_stop and not _cut(lifeline):
        _reap_all_but(child.pid)
        if child.poll() is not None:
            if restart is None:
                break
            child = restart.when_due(child)
    code = child.poll()
    if code is None:
        _ask_children(grace)
    if child.poll() is not None:  # one that does not end has had its time, and what it started is its own
        _ask_children(orphan_grace)
    _end_descendants()
    return code


def _start(command: list[str], inherited: list[int]) -> subprocess.Popen[bytes]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a command that inherits it ignored would not hear of it at all
    child = subprocess.Popen(command, pass_fds=inherited)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the asking process's to handle
    return child


class _Restart:
    """Restarts a command that ended, after a pause."""

    def __init__(self, command: list[str], file: Path) -> None:
        self._command, self._file, self._number = command, file, 0
        self._pause, self._due = FIRST_PAUSE_SECONDS / 2, 0.0
        self._started = time.monotonic()
        self._pending = False

    def when_due(self, ended: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """The new process; until it is due, the one that ended."""
        now = time.monotonic()
        if not self._pending:
            healthy = now - self._started > HEALTHY_SECONDS
            self._pause = FIRST_PAUSE_SECONDS if healthy else min(self._pause * 2, LONGEST_PAUSE_SECONDS)
            self._due, self._pending = now + self._pause, True
            print(f"exit code {ended.returncode}; restart in {self._pause:g} s", flush=True)
        if now < self._due:
            return ended
        self._pending, self._started, self._number = False, now, self._number + 1
        with contextlib.suppress(OSError):  # a full disk
            self._file.write_text(str(self._number))
        return _start(self._command, [])


def _cut(lifeline: int) -> bool:
    """Whether the other end of the pipe is closed; waits a moment for it."""
    ready, _, _ = select.select([lifeline], [], [], POLL_SECONDS)
    return bool(ready) and os.read(lifeline, 1) == b""


def _ask_children(grace: float) -> None:
    """Ask the command to end, or, once it is dead, what it started itself, and wait; what those started still lives."""
    children = psutil.Process().children()
    for process in children:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(children, timeout=grace)


def _end_descendants() -> None:
    """Ask all descendants to end, then make them."""
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
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False


def _reap_all_but(command: int) -> None:
    """Take leave of orphans that ended; a command may run, and orphan others, for a year."""
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
