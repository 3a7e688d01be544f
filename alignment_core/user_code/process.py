"""A user's function in a process of its own, which can be killed: the function may hang, crash or print anything.

``python -m alignment_core.user_code.process SOCKET_FD NAME FIELD SECONDS`` answers each JSON line that it receives with one
that has the function's numbers. A coroutine function works on many calls concurrently and has ``SECONDS`` for each. Standard
input has the files that the stage's key counts, with their digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Generator, Sequence
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM, socket, socketpair
from tempfile import TemporaryFile
from typing import Any, Literal

import psutil

from alignment_core.errors import Stopped, UserError
from alignment_core.processes import SAFE_PATH, inherited
from alignment_core.source_code import ROOT
from alignment_core.user_code import import_guard
from alignment_core.user_code.dependencies import COUNTED
from alignment_core.user_code.errors import Failed, does_not_take, raised
from alignment_core.user_code.functions import is_async, load_function
from alignment_core.user_code.reward_adapters import called_with_rows
from alignment_core.user_code.wire import line_of, read_line

LAST_SECONDS = 1.0
"""Seconds until a process that closed its socket ends, and until a cancelled coroutine answers."""
AT_A_TIME = 64
"""Calls of a coroutine function that run concurrently."""
LONGEST_LINE = 1 << 30
HOW = {
    "function": "a reward function is called with one list of completions, each a dict",
    "verifier": "a verifier is called with `prompt`, `completion` and `label`",
}
"""The calling convention of functions, by the last part of their field."""


class FunctionProcess:
    """Calls the function ``name``; each answer has ``timeout`` seconds, and its start ``load_timeout``. Close it, from any
    thread."""

    def __init__(
        self,
        name: str,
        timeout: float,
        field: str,
        files: dict[str, str] | None = None,
        path: Sequence[str] | None = None,
        load_timeout: float | None = None,
    ) -> None:
        """``files`` are the files that the stage's key counts, by default those of this context (see ``counting``); ``path`` is
        the path of imports, by default that of this process; ``load_timeout`` is by default ``timeout``."""
        self.name = name
        self.timeout = timeout
        self.load_timeout = timeout if load_timeout is None else load_timeout
        self.field = field
        self._path = path
        self._files = dict(COUNTED.get({}) if files is None else files)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._loaded = False
        self._concurrent = False

    @property
    def is_loaded(self) -> bool:
        """Whether a process has loaded the function."""
        return self._process is not None and self._loaded

    @property
    def is_concurrent(self) -> bool:
        """Whether the function is a coroutine function; known once it is loaded."""
        return self._concurrent

    @property
    def peak_memory(self) -> int:
        """The largest number of bytes of memory that its process had so far; 0 without a process."""
        process = self._process
        if process is None:
            return 0
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return 0

    def load(self) -> None:
        """Start the process, if there is none. Raises UserError if there is no such function, Stopped once this is closed."""
        if self._process is None:
            self._start()

    def answers(self, calls: Sequence[list[Any]], waiting: deque[int] | None = None) -> Generator[tuple[int, Any]]:
        """The number of each call, with the function's answer or a :class:`Failed` with the reason why there is none.

        Calls that are running when the process ends are repeated, one at a time: the call that then ends it alone has crashed,
        unlike one whose process was killed from outside. ``waiting`` are the numbers of the calls to make, which other
        workers may take, too; by default all. Raises UserError if there is no such function, Stopped once this is closed.
        """
        waiting = deque(range(len(calls))) if waiting is None else waiting
        suspects = deque[int]()
        repeated: set[int] = set()
        """Calls that ran when the process ended."""
        since: dict[int, float] = {}
        """Start times of the running calls."""
        try:
            while waiting or suspects or since:
                self.load()
                queue = suspects or waiting
                most = AT_A_TIME if self._concurrent and not suspects else 1
                while len(since) < most:
                    try:
                        number = queue.popleft()
                    except IndexError:
                        break
                    since[number] = time.monotonic()
                    self._send(number, calls[number])
                if not since:  # other workers took the waiting calls
                    break
                try:
                    number, answer = self._answer(since)
                except Failed as failure:
                    if len(since) == 1 and (failure.reason != "crashed" or since.keys() <= repeated):
                        yield since.popitem()[0], failure
                    suspects.extend(since)
                    repeated |= since.keys()
                    since.clear()
                    continue
                del since[number]
                yield number, answer
        except (OSError, ValueError):  # of a socket that was closed meanwhile
            if not self._closed:
                raise
            raise self._stopped() from None
        finally:
            if since:  # their answers would be taken for those of later calls
                self._end()

    def close(self) -> None:
        """End the process; later calls raise Stopped."""
        with self._starting:
            self._closed = True
        self._end()

    def _stopped(self) -> Stopped:
        return Stopped(f"{self.field}: {self.name!r} was ended")

    def _start(self) -> None:
        """Raises UserError if there is no such function; a process that ends before it has loaded it is started once more."""
        try:
            try:
                answer = self._first_answer()
            except Failed as error:
                if error.reason != "crashed":
                    raise
                answer = self._first_answer()
            problem = answer["problem"]
        except Failed as error:
            problem = f"{self.field}: {self.name!r} cannot be loaded: it {error}"
        if problem:
            self._end()
            raise UserError(problem)
        self._concurrent = answer["concurrent"]
        self._loaded = True
        self._patience = self.timeout + (LAST_SECONDS if self._concurrent else 0.0)

    def _first_answer(self) -> dict[str, Any]:
        """Start a process; its first answer tells whether it has loaded the function."""
        with self._starting:
            if self._closed:
                raise self._stopped()
            self._loaded = False
            self._socket, child_socket = socketpair(AF_UNIX, SOCK_STREAM)
            self._lines = self._socket.makefile("rb")
            entries = self._path or [entry or os.getcwd() for entry in sys.path]
            path = os.pathsep.join([*entries, str(ROOT)])
            with child_socket, TemporaryFile() as files:
                files.write(json.dumps(self._files).encode())
                files.seek(0)
                arguments = [str(child_socket.fileno()), self.name, self.field, str(self.timeout)]
                self._process = subprocess.Popen(
                    # with the path of imports of this process alone
                    [sys.executable, "-P", "-m", __name__, *arguments],
                    pass_fds=[child_socket.fileno()],
                    stdin=files,
                    env=_environment(path),
                    start_new_session=True,  # so that it can be ended with all that it started
                )
        return self._read(time.monotonic() + self.load_timeout, "load")

    def _send(self, number: int, arguments: list[Any]) -> None:
        self._socket.settimeout(self._patience)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading the answer raises the reason
            try:
                self._socket.sendall(line_of([number, arguments]))
            except TimeoutError:  # half a line may be sent
                self._socket.shutdown(SHUT_RDWR)

    def _answer(self, since: dict[int, float]) -> tuple[int, Any]:
        """The number and answer of the running call that ends next."""
        answer = self._read(min(since.values()) + self._patience)
        return answer["call"], Failed(*answer["failed"]) if "failed" in answer else answer["value"]

    def _read(self, deadline: float, call: Literal["load", "answer"] = "answer") -> dict[str, Any]:
        """The next line of the process. A process that is late is ended; the next call starts a new one."""
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            line = self._lines.readline()
        except TimeoutError:
            self._end()
            raise (_late(self.timeout) if call == "answer" else _loads_too_long(self.load_timeout)) from None
        except ConnectionResetError:
            line = b""
        if line:
            return json.loads(line)
        code = self._end(LAST_SECONDS)
        if self._closed:
            raise self._stopped()
        raise Failed("crashed", f"ended its process (exit code {code})")

    def _end(self, patience: float = 0.0) -> int | None:
        """End the process and its children; its exit code, if it ended by itself within ``patience`` seconds."""
        process = self._process
        self._process = None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.returncode
        children = _children(process.pid)  # some may have started their own session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.wait()
        self._lines.close()
        self._socket.close()
        return code

    def __enter__(self) -> FunctionProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment(path: str) -> dict[str, str]:
    """The process's variables; scripts that the user's code starts import files beside them, as they do in a shell."""
    environment = inherited(PYTHONPATH=path)
    for name in SAFE_PATH:  # `-P` applies to this process alone
        del environment[name]
    return environment


def _children(pid: int) -> list[psutil.Process]:
    """All descendants of a process, if it still exists."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _late(timeout: float) -> Failed:
    return Failed("timeout", f"gave no answer within {timeout:g} seconds (resources.reward_timeout_seconds)")


def _loads_too_long(timeout: float) -> Failed:
    return Failed("timeout", f"was not loaded within {timeout:g} seconds (resources.reward_load_timeout_seconds)")


def main() -> None:
    """Entry point. Arguments: the socket's file descriptor, the function's name, the field that names it, seconds."""
    import_guard.serve(json.load(sys.stdin))
    with socket(fileno=int(sys.argv[1])) as end:
        threading.Thread(target=_end_with, args=(end.fileno(),), daemon=True).start()
        try:
            function = load_function(*sys.argv[2:4])
            concurrent = is_async(function)  # before an adapter wraps it in a function that is not async
            if sys.argv[3].endswith(".function"):
                function = called_with_rows(function, *sys.argv[2:4])
        except UserError as error:
            end.sendall(_line(problem=str(error)))
            return
        end.sendall(_line(problem=None, concurrent=concurrent))
        if concurrent:
            asyncio.run(_serve_concurrently(function, end, sys.argv[3], float(sys.argv[4])))
        else:
            _serve(function, end, sys.argv[3])


def _end_with(descriptor: int) -> None:
    """End this process when the other one closes its socket, also while the function hangs: on another node, no other process
    would end it."""
    closed = select.poll()
    closed.register(descriptor, select.POLLRDHUP)
    closed.poll()
    os._exit(1)


def _serve(function: Any, end: socket, field: str) -> None:
    with end.makefile("rb") as lines:
        for line in lines:
            number, arguments = read_line(line)
            try:
                value = function(*arguments)
                if inspect.isawaitable(value):  # of an async function inside a decorator
                    value = asyncio.run(_awaited(value))
                answer = _line(call=number, value=_plain(value))
            except Exception as error:  # the user's code runs here
                answer = _raised(number, error, field)
            end.sendall(answer)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _serve_concurrently(function: Any, end: socket, field: str, timeout: float) -> None:
    lines, answers = await asyncio.open_connection(sock=end, limit=LONGEST_LINE)

    async def call(line: bytes) -> None:
        number, arguments = read_line(line)
        try:
            async with asyncio.timeout(timeout) as deadline:
                value = await function(*arguments)
            answer = _line(call=number, value=_plain(value))
        except Exception as error:  # the user's code runs here
            late = _late(timeout)
            failed = _line(call=number, failed=[late.reason, str(late)])
            answer = failed if deadline.expired() else _raised(number, error, field)
        answers.write(answer)

    running = set()
    while line := await lines.readline():
        task = asyncio.create_task(call(line))
        running.add(task)
        task.add_done_callback(running.discard)


def _plain(value: Any) -> Any:
    """Numbers for JSON, also those of arrays and tensors; a dict is unchanged. Raises as ``float`` does."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        return None if value is None else float(value)
    return [None if number is None else float(number) for number in value]


def _raised(number: int, error: Exception, field: str) -> bytes:
    if isinstance(error, Failed):
        return _line(call=number, failed=[error.reason, str(error)])
    how = HOW.get(field.rpartition(".")[2]) if does_not_take(error, "_serve", "call") else None
    hint = f"; {how} (docs/recipes/rewards.md)" if how else ""
    return _line(call=number, failed=["raised", f"failed: {raised(error)}{hint}"])


def _line(**content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


if __name__ == "__main__":
    main()
