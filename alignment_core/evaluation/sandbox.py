"""Programs that nobody has read, run within limits: the side that starts, watches and ends them.

What a program may do is decided in :mod:`~alignment_core.evaluation.sandboxed`, in its own process, before it begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from alignment_core.errors import EnvironmentFault, Stopped
from alignment_core.evaluation import sandboxed

SECONDS = 30.0
"""Wall time of a program, from the start of its process."""
FOLDER_BYTES, FOLDER_FILES = 64 << 20, 256
"""What a program may leave in its folder at any time …"""
LOOK_SECONDS = 0.1
"""… and how often that is looked at."""
READY = b"ready"


@dataclass(frozen=True)
class Ended:
    """How a program ended. ``code`` is None if it was killed for its wall time or for what it left in its folder."""

    code: int | None
    output: bytes


def run_program(
    program: str,
    given: str,
    stop: threading.Event,
    tests: str | None = None,
    token: str = "",
    seconds: float = SECONDS,
) -> Ended:
    """Run a Python program with ``given`` as its standard input, and see what it writes in so many ``seconds``.

    With ``tests`` these run after the program, in its interpreter, and the only output is ``token`` once they passed.
    Raises EnvironmentFault if this machine cannot hold the program within its limits, Stopped once ``stop`` is set.
    """
    with (
        tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as standard_input,
        tempfile.TemporaryFile() as output,
    ):
        job.write(json.dumps({"program": program, "tests": tests, "token": token, "folder": folder}).encode())
        standard_input.write(given.encode(errors="replace"))
        for file in (job, standard_input):
            file.seek(0)
        says, told = os.pipe()
        with os.fdopen(says, "rb") as report:
            try:
                process = subprocess.Popen(
                    # no user's site-packages, no folder of the program on the path, no byte code written
                    [sys.executable, "-s", "-P", "-B", sandboxed.__file__, str(job.fileno()), str(told)],
                    stdin=standard_input,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_environment(folder),
                    pass_fds=[job.fileno(), told],
                    start_new_session=True,
                )
            finally:
                os.close(told)
            try:
                code = _watch(process, Path(folder), stop, seconds)
            finally:
                _kill(process)
            said = report.read()
        if said != READY:
            why = said.decode() or (f"exit code {code}" if code is not None else f"no start within {seconds:g} seconds")
            raise EnvironmentFault(f"a program cannot be run within limits on this machine: {why}")
        output.seek(0)
        return Ended(code, output.read())


def _environment(folder: str) -> dict[str, str]:
    """No variable of ours, which may be a secret; the same order of sets in every run; no thread per core at import."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}


def _watch(process: subprocess.Popen[bytes], folder: Path, stop: threading.Event, seconds: float) -> int | None:
    """Its exit code once it ends; None if it is to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _fits(folder):
        if stop.is_set():
            raise Stopped("the programs were ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_SECONDS)
    return None


def _fits(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it is removing files
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)]
        return len(sizes) <= FOLDER_FILES and sum(sizes) <= FOLDER_BYTES
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
