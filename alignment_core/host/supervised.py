"""Starting a command under the supervisor: it ends, with all that it started, when it is closed or this process dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CLOSE_SECONDS = 30.0  # more than the supervisor itself needs, beside the command's grace


class Supervised:
    """A running command. ``temporary`` is a folder of its own that goes when it ends; output is appended to ``log``.

    When it is to end, the command has ``grace`` seconds for itself before what it started is ended, too.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        temporary: Path,
        inherited: Sequence[int] = (),
        grace: float = 0.0,
    ) -> None:
        self.temporary, self.grace = temporary, grace
        read_end, self._lifeline = os.pipe()
        fds = ",".join(map(str, inherited))
        supervisor = [sys.executable, "-m", "alignment_core.host.supervisor"]
        supervisor += [str(read_end), str(temporary), fds, str(grace)]
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
            self.process.wait(self.grace + CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
