"""Starting a command under the supervisor: it ends, with all that it started, when it is closed or this process dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CLOSE_SECONDS = 30.0  # more than the supervisor itself needs


class Supervised:
    """A running command. ``temporary`` is a folder of its own that goes when it ends; output is appended to ``log``."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        temporary: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        self.temporary = temporary
        read_end, self._lifeline = os.pipe()
        fds = ",".join(map(str, inherited))
        supervisor = [sys.executable, "-m", "alignment_core.host.supervisor", str(read_end), str(temporary), fds]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*supervisor, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end, *inherited),
                    start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
                    env=dict(environment),
                )
        except BaseException:
            os.close(self._lifeline)
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(read_end)

    def close(self) -> None:
        """End it and wait until nothing of it is left. May be called again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
