"""A user's function in a process of its own, which can be killed: it may hang, crash or print what it likes.

``python -m alignment_core.user_code.process SOCKET_FD NAME FIELD SECONDS`` answers one JSON line for each that it is
sent: the function's numbers. A coroutine function works on many at a time and has ``SECONDS`` for each. Its standard input has
the files that the stage's key counts, with their digests.
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
from typing import Any

import psutil

from alignment_core.errors import Stopped, UserError
from alignment_core.processes import SAFE_PATH, inherited
from alignment_core.user_code import dependencies as user_code
from alignment_core.user_code import import_guard as user_modules
from alignment_core.user_code.errors import Failed, does_not_take, raised
from alignment_core.user_code.functions import is_async, load_function
from alignment_core.user_code.reward_adapters import called_with_rows

ROOT = Path(__file__).parents[2]
LAST_SECONDS = 1.0
"""How long a process that hung up has until it is gone, and a coroutine that was cancelled until it says so."""
AT_A_TIME = 64
"""Calls of a coroutine function that run concurrently."""
LONGEST_LINE = 1 << 30
HOW = {
    "function": "a reward function is called with one list of completions, each a dict",
    "verifier": "a verifier is called with `prompt`, `completion` and `label`",
}
"""How functions are called, by the last part of the field that names them."""


class FunctionProcess:
    """Calls the function ``name``; its start and each answer have ``timeout`` seconds. Close it, from any thread."""

    def __init__(
        self,
        name: str,
        timeout: float,
        field: str,
        files: dict[str, str] | None = None,
        path: Sequence[str] | None = None,
    ) -> None:
        """``files`` are those that the stage's key counts, if this is not made in its context (see ``counting``); ``path`` is
        where imports look, by default as in this process."""
        self.name, self.timeout, self.field = name, timeout, field
        self._path = path
        self._files = dict(user_code.COUNTED.get({}) if files is None else files)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = self._loaded = self._concurrent = False

    @property
    def is_loaded(self) -> bool:
        """Whether a process is there that has loaded the function."""
        return self._process is not None and self._loaded

    @property
    def is_concurrent(self) -> bool:
        """Whether the function is a coroutine function; known once it is loaded."""
        return self._concurrent

    def load(self) -> None:
        """Start the process, if there is none. Raises UserError if there is no such function, Stopped once this is closed."""
        if self._process is None:
            self._start()

    def answers(self, calls: Sequence[list[Any]], waiting: deque[int] | None = None) -> Generator[tuple[int, Any]]:
        """The number of each call, and what the function answers to these arguments or the :class:`Failed` that says why not.

        Calls that were under way when the process ended are made again, one by one, and one that is alone when it ends has
        crashed: a process may be killed from outside, too. ``waiting`` are the numbers of the calls that are not made yet,
        which others may take, too; by default all. Raises UserError if there is no such function, Stopped once this is closed.
        """
        waiting, suspects = deque(range(len(calls))) if waiting is None else waiting, deque[int]()
        again: set[int] = set()
        """Calls that were under way when the process ended."""
        since: dict[int, float] = {}
        """When each call that is under way began."""
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
                if not since:  # another took what waited
                    break
                try:
                    number, answer = self._answer(since)
                except Failed as failure:
                    if len(since) == 1 and (failure.reason != "crashed" or since.keys() <= again):
                        yield since.popitem()[0], failure
                    suspects.extend(since)
                    again |= since.keys()
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
        """End the process, and answer no more."""
        with self._starting:
            self._closed = True
        self._end()

    def _stopped(self) -> Stopped:
        return Stopped(f"{self.field}: {self.name!r} was ended")

    def _start(self) -> None:
        """Raises UserError if there is no such function; a process that ends before it says so has a second try."""
        try:
            try:
                answer = self._first_words()
            except Failed as error:
                if error.reason != "crashed":
                    raise
                answer = self._first_words()
            problem = answer["problem"]
        except Failed as error:
            problem = f"{self.field}: {self.name!r} cannot be loaded: it {error}"
        if problem:
            self._end()
            raise UserError(problem)
        self._concurrent, self._loaded = answer["concurrent"], True
        self._patience = self.timeout + (LAST_SECONDS if self._concurrent else 0.0)

    def _first_words(self) -> dict[str, Any]:
        """Of a new process."""
        with self._starting:
            if self._closed:
                raise self._stopped()
            self._loaded = False
            self._socket, theirs = socketpair(AF_UNIX, SOCK_STREAM)
            self._lines = self._socket.makefile("rb")
            entries = self._path or [one or os.getcwd() for one in sys.path]
            path = os.pathsep.join([*entries, str(ROOT)])
            with theirs, TemporaryFile() as files:
                files.write(json.dumps(self._files).encode())
                files.seek(0)
                arguments = [str(theirs.fileno()), self.name, self.field, str(self.timeout)]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, *arguments],  # imports find what they find here,
                    pass_fds=[theirs.fileno()],
                    stdin=files,
                    env=_environment(path),
                    start_new_session=True,  # so that it can be ended with all that it started
                )
        return self._read(time.monotonic() + self.timeout)

    def _send(self, number: int, arguments: list[Any]) -> None:
        self._socket.settimeout(self._patience)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading the answer says what is wrong
            try:
                self._socket.sendall(json.dumps([number, arguments]).encode() + b"\n")
            except TimeoutError:  # half a line may be sent
                self._socket.shutdown(SHUT_RDWR)

    def _answer(self, since: dict[int, float]) -> tuple[int, Any]:
        """Of the calls that are under way, the number of the one that is done next, and its answer."""
        found = self._read(min(since.values()) + self._patience)
        return found["call"], Failed(*found["failed"]) if "failed" in found else found["value"]

    def _read(self, deadline: float) -> dict[str, Any]:
        """What the process says next. One that says nothing is ended, and the next call has a new one."""
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            line = self._lines.readline()
        except TimeoutError:
            self._end()
            raise _late(self.timeout) from None
        except ConnectionResetError:
            line = b""
        if line:
            return json.loads(line)
        code = self._end(LAST_SECONDS)
        if self._closed:
            raise self._stopped()
        raise Failed("crashed", f"ended its process (exit code {code})")

    def _end(self, patience: float = 0.0) -> int | None:
        """End the process with all that it started; its exit code, if it was over within ``patience`` seconds."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.returncode
        children = _children(process.pid)  # some may have begun a session of their own
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
    """Of the process: scripts that the user's code starts find what lies beside them, as they do in a shell."""
    environment = inherited(PYTHONPATH=path)
    for name in SAFE_PATH:  # `-P` says it to this process alone
        del environment[name]
    return environment


def _children(pid: int) -> list[psutil.Process]:
    """All below this process, if it is still there."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _late(timeout: float) -> Failed:
    return Failed("timeout", f"gave no answer within {timeout:g} seconds (resources.reward_timeout_seconds)")


def main() -> None:
    """Entry point. Arguments: the socket's file descriptor, the function's name, the field that names it, seconds."""
    user_modules.serve(json.load(sys.stdin))
    with socket(fileno=int(sys.argv[1])) as end:
        threading.Thread(target=_end_with, args=(end.fileno(),), daemon=True).start()
        try:
            function = load_function(*sys.argv[2:4])
            user_modules.check_modules()
            if sys.argv[3].endswith(".function"):
                function = called_with_rows(function, *sys.argv[2:4])
        except UserError as error:
            end.sendall(_line(problem=str(error)))
            return
        concurrent = is_async(function)
        end.sendall(_line(problem=None, concurrent=concurrent))
        if concurrent:
            asyncio.run(_serve_concurrently(function, end, sys.argv[3], float(sys.argv[4])))
        else:
            _serve(function, end, sys.argv[3])


def _end_with(descriptor: int) -> None:
    """End this process once the other one hangs up, also while the function hangs: on another node nobody else would."""
    hung_up = select.poll()
    hung_up.register(descriptor, select.POLLRDHUP)
    hung_up.poll()
    os._exit(1)


def _serve(function: Any, end: socket, field: str) -> None:
    with end.makefile("rb") as asked:
        for line in asked:
            number, arguments = json.loads(line)
            try:
                value = function(*arguments)
                if inspect.isawaitable(value):  # of a function whose decorator hides that it is async
                    value = asyncio.run(_awaited(value))
                value = _plain(value)
                user_modules.check_modules()
                answer = _line(call=number, value=value)
            except Exception as error:  # the user's code runs here
                answer = _raised(number, error, field)
            end.sendall(answer)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _serve_concurrently(function: Any, end: socket, field: str, timeout: float) -> None:
    asked, answers = await asyncio.open_connection(sock=end, limit=LONGEST_LINE)

    async def call(line: bytes) -> None:
        number, arguments = json.loads(line)
        try:
            async with asyncio.timeout(timeout) as deadline:
                value = await function(*arguments)
            user_modules.check_modules()
            answer = _line(call=number, value=_plain(value))
        except Exception as error:  # the user's code runs here
            late = _late(timeout)
            failed = _line(call=number, failed=[late.reason, str(late)])
            answer = failed if deadline.expired() else _raised(number, error, field)
        answers.write(answer)

    running = set()
    while line := await asked.readline():
        task = asyncio.create_task(call(line))
        running.add(task)
        task.add_done_callback(running.discard)


def _plain(value: Any) -> Any:
    """Numbers as JSON has them, also those of arrays and tensors; a dict as it is. Raises what ``float`` raises."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        return None if value is None else float(value)
    return [None if one is None else float(one) for one in value]


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
