"""The process that writes the trajectories of steps, so that the run's own process only copies their bytes into a socket.

``python -m alignment_core.rollout.trajectory_writer SOCKET_FD`` makes the calls that it receives, and answers
each with None or its error. It ends with the thread that started it, also if that is killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM, socket, socketpair
from typing import Any

import numpy as np

from alignment_core.errors import InfrastructureError
from alignment_core.processes import end_with_parent, inherited
from alignment_core.source_code import ROOT

BUFFERED = 1 << 20
"""Bytes that are collected for one system call."""


class TrajectoryWriter:
    """Starts the process, and passes calls on to it. Use it from one thread, with which the process ends."""

    def __init__(self) -> None:
        self._socket, child_socket = socketpair(AF_UNIX, SOCK_STREAM)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                env=inherited(PYTHONPATH=path),
                start_new_session=True,  # an interrupt from the terminal is for the run, which may still save a step
            )

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of a module in the process, with plain data and arrays, which are copied once. Raises its error, and
        InfrastructureError if the process dies."""
        try:
            with BufferedWriter(self._socket.makefile("wb", 0), BUFFERED) as requests:
                send((function, arguments), requests)
            with self._socket.makefile("rb") as answers:
                error = receive(answers)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._process.wait()
            memory = "; the kernel may have killed it for lack of memory" if code == -signal.SIGKILL else ""
            raise InfrastructureError(
                f"the process that writes the steps of `rl.trajectories` ended (exit code {code}){memory}"
            ) from None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(SHUT_RDWR)  # a fork of this process may have the descriptor, too
        self._socket.close()
        self._process.wait()


def send(value: Any, file: BufferedWriter[Any]) -> None:
    """Write a picklable value, with the bytes of its arrays as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    file.write(np.int64(len(parts)).tobytes())
    file.write(np.array([len(part) for part in parts], np.int64).tobytes())
    for part in parts:
        file.write(part)
    file.flush()


def receive(file: BufferedReader[Any]) -> Any:
    """The next value. Raises EOFError at the end of the file."""
    count = int(np.frombuffer(_read(file, 8), np.int64)[0])
    head, *buffers = (_read(file, size) for size in np.frombuffer(_read(file, 8 * count), np.int64).tolist())
    return pickle.loads(head, buffers=buffers)


def _read(file: BufferedReader[Any], size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        length = file.readinto(rest)
        if not length:
            raise EOFError
        rest = rest[length:]
    return data


def main() -> None:
    """Entry point. Argument: the socket's file descriptor."""
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):  # the run that they end may still save a step
        signal.signal(number, signal.SIG_IGN)
    with (
        socket(fileno=int(sys.argv[1])) as end,
        BufferedReader(end.makefile("rb", 0), BUFFERED) as requests,
        end.makefile("wb") as answers,
    ):
        while True:
            try:
                function, arguments = receive(requests)
            except EOFError:
                return
            send(_error_of(function, arguments), answers)
            del arguments  # so that two steps are never in memory


def _error_of(function: Callable[..., object], arguments: tuple[Any, ...]) -> Exception | None:
    """The error of a call, as its caller can receive it."""
    try:
        function(*arguments)
    except OSError as error:
        return error
    except Exception as error:
        traceback.print_exc()  # which is not sent
        return _picklable(error)
    return None


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error


if __name__ == "__main__":
    main()
