"""Run a command under the supervisor: closing it, or the end of this process, ends its whole process tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment_core.home import align_home
from alignment_core.host.supervisor import IN_USE, RESTART, RESTARTS, discard
from alignment_core.processes import SAFE_PATH, is_locked
from alignment_core.stop_time import SUPERVISORS, extended, supervisors

YOUNG_SECONDS = 60.0
LONGEST_SOCKET_FOLDER = 25  # Ray's socket paths below it must stay under the kernel's 107 bytes
CLOSE_SECONDS = 30.0  # more than the supervisor needs beyond the two grace periods


def fresh_folder(parent: Path, prefix: str) -> Path:
    """A new folder for a command's temporary files. Folders of killed supervisors are removed first."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            is_old = time.time() - old.stat().st_mtime > YOUNG_SECONDS
            if is_old and not is_locked(old / IN_USE):  # raises without the mark: then it is not ours
                discard(old)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def short_folder() -> Path:
    """A folder for Ray's sockets and the trainers' rendezvous: below ALIGN_HOME if its path is short enough."""
    parent = align_home() / "tmp"
    if len(str(parent)) <= LONGEST_SOCKET_FOLDER:
        return fresh_folder(parent, "r")
    return fresh_folder(Path(tempfile.gettempdir()), "align-")


class Supervised:
    """A running command. Its folder ``temporary`` is removed at the end; its output is appended to ``log``. Its Python
    imports no modules from the working folder.

    On ``close`` the command has ``grace`` seconds before its children are ended, and surviving children have ``orphan_grace``
    seconds; both are longer if the command noted that it needs longer (``stop_time.py``). With ``restart``, a command that
    exits is started again after a pause, and its children keep running.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        temporary: Path,
        inherited: Sequence[int] = (),
        grace: float = 0.0,
        orphan_grace: float = 0.0,
        restart: bool = False,
    ) -> None:
        self.temporary = temporary
        self._graces = (grace, orphan_grace)
        read_end, self._lifeline = os.pipe()
        fds = ",".join(map(str, inherited))
        supervisor = [sys.executable, "-m", "alignment_core.host.supervisor"]
        supervisor += [
            str(read_end),
            str(temporary),
            fds,
            str(grace),
            str(orphan_grace),
            *([RESTART] if restart else []),
        ]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*supervisor, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end, *inherited),
                    start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which then ends the tree in order
                    env={
                        **environment,
                        **SAFE_PATH,
                        SUPERVISORS: os.pathsep.join(map(str, (*supervisors(), temporary))),
                    },
                )
        except BaseException:
            os.close(self._lifeline)
            discard(temporary)
            raise
        finally:
            os.close(read_end)

    @property
    def restarts(self) -> int:
        """Number of restarts of the command."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.temporary / RESTARTS).read_text())
        return 0

    def cut_lifeline(self) -> None:
        """Have the supervisor end the command, as if this process had ended. May be called again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        """End the command and wait until no process of it is left. May be called again."""
        self.cut_lifeline()
        try:
            self.process.wait(sum(extended(grace, self.temporary) for grace in self._graces) + CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        discard(self.temporary)
