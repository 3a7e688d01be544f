"""Untrusted programs, run within limits: starting, watching and ending them.

:mod:`~alignment_core.rewards.sandbox.system_calls` lists the rights of a program; its process gives up all others in
:mod:`~alignment_core.rewards.sandbox.process` before it begins. No maintained package that pip installs enforces the same
limits: bubblewrap is a system package that needs user namespaces, which containers and some distributions refuse, and it limits
neither threads nor disk; ``pyseccomp`` (last released in 2021) needs the system's libseccomp; ``landlock`` is an early release.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from alignment_core.errors import EnvironmentFault, Stopped
from alignment_core.rewards.sandbox import process as sandboxed
from alignment_core.rewards.sandbox import system_calls

SECONDS = 30.0
"""Wall time of a program, from the start of its process."""
THREADS, FILES = 256, 64
"""Limits of a program: threads that it starts, and times that it opens a file with the right to create it."""
POLL_SECONDS = 0.1
"""Poll interval of the stop flag."""
READY = b" ready"
NOTICE, ANSWER = 80, 24
RECEIVE, SEND = 0xC0002100 | NOTICE << 16, 0xC0002101 | ANSWER << 16
CONTINUE = 1

NOT_HELD = """
import os, socket, threading
def refused(attempt, *given):
    try: attempt(*given)
    except OSError: return True
limits = {
    "starts processes": refused(os.fork), "opens sockets": refused(socket.socket),
    "reads files": refused(open, "/proc/self/environ"), "signals processes": refused(os.kill, os.getppid(), 0),
}
thread = threading.Thread(target=print, args=("started",))
thread.start(); thread.join()
open("file", "w").write("written")
print(*(name for name, holds in limits.items() if not holds), open("file").read())
"""
"""Prints the limits that do not hold, between the outputs of actions that must work."""


@dataclass(frozen=True)
class Ended:
    """The end of a program. ``code`` is None if it exceeded its wall time and was killed."""

    code: int | None
    output: bytes


def run_program(program: str, given: str, stop: threading.Event, seconds: float = SECONDS) -> Ended:
    """Run a Python program with ``given`` as its standard input for at most ``seconds``; returns its standard output.

    Raises EnvironmentFault if this machine cannot enforce the limits, Stopped once ``stop`` is set.
    """
    with tempfile.TemporaryFile() as output, _Sandbox({"program": program}, given, output) as sandbox:
        code = _watch([sandbox], stop, seconds)
        output.seek(0)
        return Ended(code, output.read())


def passes_tests(program: str, tests: str, stop: threading.Event) -> bool:
    """Run Python ``tests`` in a process of their own, which calls the program's functions in another one.

    Raises as ``run_program`` does.
    """
    asks, answers = socket.socketpair()
    with asks, answers, tempfile.TemporaryFile() as output, contextlib.ExitStack() as stack:
        tester = stack.enter_context(_Sandbox({"tests": tests}, "", output, asks))
        tested = stack.enter_context(_Sandbox({"program": program}, "", None, answers))
        asks.close()
        answers.close()
        code = _watch([tester, tested], stop, SECONDS)
        output.seek(0)
        return code == 0 and output.read() == sandboxed.PASSED


def check_limits(stop: threading.Event) -> None:
    """Try forbidden actions on this machine. Raises EnvironmentFault if one is possible, or if no program runs."""
    ended = run_program(NOT_HELD, "", stop)
    if ended.code != 0 or ended.output.decode().split() != ["started", "written"]:
        raise EnvironmentFault(
            f"cannot keep a program within its limits on this machine: {ended.output!r}, {ended.code}"
        )


class _Sandbox:
    """One process within limits, for as long as the context lasts."""

    def __init__(
        self, job: dict[str, str], given: str, output: IO[bytes] | None, channel: socket.socket | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True))
            self._status_socket, child_socket = socket.socketpair()
            self._status_socket.setblocking(False)
            stack.callback(self._status_socket.close)
            defaults = {"program": None, "tests": None, "channel": channel and channel.fileno(), "folder": folder}
            with tempfile.TemporaryFile() as job_file, tempfile.TemporaryFile() as standard_input, child_socket:
                job_file.write(json.dumps({**defaults, **job, **_filters()}).encode())
                standard_input.write(given.encode(errors="replace"))
                for file in (job_file, standard_input):
                    file.seek(0)
                descriptors = (job_file.fileno(), child_socket.fileno())
                self.process = subprocess.Popen(
                    # no user's site-packages, no folder of the program on the path, no byte code written
                    [sys.executable, "-s", "-P", "-B", sandboxed.__file__, *map(str, descriptors)],
                    stdin=standard_input,
                    stdout=subprocess.DEVNULL if output is None else output,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=_environment(folder),
                    pass_fds=[*descriptors, *([channel.fileno()] if channel else [])],
                    start_new_session=True,
                )
            stack.callback(self._kill)
            # readable once the process ended: one poll waits for that and for its requests, without a signal handler
            self.ended = os.pidfd_open(self.process.pid)
            stack.callback(os.close, self.ended)
            self.status = b""
            self.listener: int | None = None
            self._remaining = {"clone": THREADS, "open": FILES}
            self._stack = stack.pop_all()

    def __enter__(self) -> _Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Descriptors to poll, with their handlers."""
        handlers: dict[int, Callable[[], None]] = {self.ended: lambda: None}
        if self._status_socket.fileno() >= 0:
            handlers[self._status_socket.fileno()] = self.receive
        if self.listener is not None:
            handlers[self.listener] = self.answer
        return handlers

    def receive(self) -> None:
        """Read the process's status; its first byte comes with the descriptor of its requests."""
        with contextlib.suppress(BlockingIOError):
            while self._status_socket.fileno() >= 0:
                received, descriptors, _, _ = socket.recv_fds(self._status_socket, 4096, 1)
                self.status += received
                for listener in descriptors:
                    self.listener = listener
                    self._stack.callback(os.close, listener)
                if not received:
                    self._status_socket.close()

    def answer(self) -> None:
        """Answer a request for a thread, or for a file that may be created: allowed up to the limit of each."""
        notice = bytearray(NOTICE)
        with contextlib.suppress(OSError):  # the process was killed, or a signal came
            assert self.listener is not None
            fcntl.ioctl(self.listener, RECEIVE, notice, True)
            number, call = struct.unpack_from("=Q8xi", notice)
            kind = "clone" if call == system_calls.number_of("clone", _machine()) else "open"
            self._remaining[kind] -= 1
            # seccomp_unotify(2) warns that memory which arguments point to may change before the kernel continues: only the
            # number of calls is limited here, and the filters check flags in registers alone
            refused = -errno.EAGAIN if kind == "clone" else -errno.EDQUOT
            answer = (number, 0, 0, CONTINUE) if self._remaining[kind] >= 0 else (number, 0, refused, 0)
            fcntl.ioctl(self.listener, SEND, struct.pack("=QqiI", *answer))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _machine() -> system_calls.Machine:
    machine = system_calls.MACHINES.get(platform.machine())
    if machine is None or platform.system() != "Linux" or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        known = " or ".join(system_calls.MACHINES)
        raise EnvironmentFault(
            f"needs 64-bit Linux on {known}, but this is {platform.system()} on {platform.machine()}"
        )
    return machine


def _filters() -> dict[str, Any]:
    machine = _machine()
    filters = {"counting": system_calls.counting(machine), "allowing": system_calls.allowing(machine)}
    return {
        **{name: steps.hex() for name, steps in filters.items()},
        "capset": machine.capset,
        "seccomp": machine.seccomp,
    }


def _environment(folder: str) -> dict[str, str]:
    """None of our variables, which may be secrets; the same order of sets in every run; no thread per core at import."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}


def _watch(sandboxes: list[_Sandbox], stop: threading.Event, seconds: float) -> int | None:
    """Exit code of the first sandbox; None at the end of its time. Raises EnvironmentFault if one could not start."""
    first = sandboxes[0]
    deadline = time.monotonic() + seconds
    while (code := first.process.poll()) is None and (left := deadline - time.monotonic()) > 0:
        if stop.is_set():
            raise Stopped("the programs were ended")
        _attend(sandboxes, min(left, POLL_SECONDS))
    for sandbox in sandboxes:
        sandbox.receive()
    reason = next((text for each in sandboxes if (text := each.status.strip()) not in (b"", b"ready")), b"").decode()
    if not reason and first.status != READY:
        reason = f"exit code {code}" if code is not None else f"no start within {seconds:g} seconds"
    if reason:
        raise EnvironmentFault(f"a program cannot be run within limits on this machine: {reason}")
    return code


def _attend(sandboxes: list[_Sandbox], seconds: float) -> None:
    """Wait for requests of the processes for at most so many seconds, and answer them."""
    poll = select.poll()
    handlers: dict[int, Callable[[], None]] = {}
    for sandbox in sandboxes:
        if sandbox.process.poll() is None:
            handlers |= sandbox.handlers()
    for descriptor in handlers:
        poll.register(descriptor, select.POLLIN)
    for descriptor, event in poll.poll(seconds * 1000):
        if event & select.POLLIN:
            handlers[descriptor]()
