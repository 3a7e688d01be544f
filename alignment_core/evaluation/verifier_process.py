"""A user's verifier in a process of its own, which can be killed: the function may hang, crash or print what it likes.

``python -m alignment_core.evaluation.verifier_process SOCKET_FD NAME FIELD`` answers one JSON line for each that it is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket, socketpair
from typing import Any

from alignment_core.errors import UserError
from alignment_core.evaluation.verifiers import FIELD, load_verifier

ROOT = Path(__file__).parents[2]
LAST_SECONDS = 1.0
"""How long a process that hung up has until it is gone."""


class Failed(Exception):
    """One completion has no reward; the message says why, after the verifier's name."""


class VerifierProcess:
    """Asks the verifier ``name`` for scores; its start and each answer have ``timeout`` seconds. Close it."""

    def __init__(self, name: str, timeout: float, field: str = FIELD) -> None:
        self.name, self.timeout, self.field = name, timeout, field
        self._process: subprocess.Popen[bytes] | None = None

    def score(self, prompt: str, completion: str, label: str | None) -> float:
        """What the function answers. Raises Failed, or UserError if there is no such function."""
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError, TimeoutError):  # reading the answer says what is wrong
            self._socket.sendall(json.dumps([prompt, completion, label]).encode() + b"\n")
        answer = self._answer()
        if "score" not in answer:
            raise Failed(answer["failed"])
        return float(answer["score"])

    def _start(self) -> None:
        self._socket, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        self._socket.settimeout(self.timeout)
        self._lines = self._socket.makefile("rb")
        path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), self.name, self.field],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # so that it can be ended with all that it started
            )
        try:
            problem = self._answer()["problem"]
        except Failed as error:
            problem = f"{self.field}: {self.name!r} cannot be loaded: it {error}"
        if problem:
            self.close()
            raise UserError(problem)

    def _answer(self) -> dict[str, Any]:
        """The next answer. A process that gives none is ended, and the next completion has a new one."""
        try:
            line = self._lines.readline()
        except TimeoutError:
            self.close()
            raise Failed(f"gave no answer within {self.timeout:g} seconds (resources.reward_timeout_seconds)") from None
        except ConnectionResetError:
            line = b""
        if line:
            return json.loads(line)
        raise Failed(f"ended its process (exit code {self.close(LAST_SECONDS)})")

    def close(self, patience: float = 0.0) -> int | None:
        """End the process with all that it started; its exit code, if it was over within ``patience`` seconds."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._lines.close()
        self._socket.close()
        return code

    def __enter__(self) -> VerifierProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Entry point. Arguments: the socket's file descriptor, the verifier's name, the field that names it."""
    with socket(fileno=int(sys.argv[1])) as end, end.makefile("rb") as asked:

        def answer(**content: Any) -> None:
            end.sendall(json.dumps(content).encode() + b"\n")

        try:
            function = load_verifier(*sys.argv[2:4])
        except UserError as error:
            answer(problem=str(error))
            return
        answer(problem=None)
        for line in asked:
            try:
                answer(score=float(function(*json.loads(line))))
            except Exception as error:  # the user's code runs here
                answer(failed=f"failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
