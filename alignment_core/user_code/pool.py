"""A user's function in several processes at once: a pool that grows when calls wait."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from alignment_core.user_code.counted import COUNTED
from alignment_core.user_code.process import FunctionProcess

GROWS_AFTER_SECONDS = 0.25
"""Once a function is loaded: if calls still wait by then, it is worth it to load it in more processes."""


@dataclass
class _Member:
    process: FunctionProcess
    busy: threading.Lock = field(default_factory=threading.Lock)


class FunctionPool:
    """Calls the function ``name`` in up to ``size`` processes, each as :class:`FunctionProcess` has it; close it, from any
    thread.

    All answer from one queue, so what each of them is asked depends on who is free: a function that remembers something from
    call to call does so in each process for itself. The first process starts with the first call, the others when calls wait.
    A coroutine function has one process, which works on many calls at a time.
    """

    def __init__(
        self, name: str, timeout: float, field: str, size: int | None = 1, files: dict[str, str] | None = None
    ) -> None:
        """``size`` is by default the number of cores; ``files`` as FunctionProcess has them."""
        self.name, self.timeout, self.field = name, timeout, field
        self._files = dict(COUNTED.get({}) if files is None else files)
        self._members = [_Member(self._process()) for _ in range(size or len(os.sched_getaffinity(0)))]
        self._closing, self._closed = threading.Lock(), False

    def _process(self) -> FunctionProcess:
        return FunctionProcess(self.name, self.timeout, self.field, self._files)

    def answers(self, calls: Sequence[list[Any]]) -> Generator[tuple[int, Any]]:
        """As FunctionProcess.answers, one call of this at a time."""
        if not calls:
            return
        waiting, told = deque(range(len(calls))), SimpleQueue[Any]()
        first = [one for one in self._members if one.process.is_loaded][: len(calls)] or self._members[:1]
        others = [one for one in self._members if one not in first]
        grows_at: float | None = None
        left = len(calls)
        try:
            self._begin(first, calls, waiting, told)
            while left:
                if grows_at is not None and time.monotonic() >= grows_at:
                    self._begin(others[: len(waiting)], calls, waiting, told)
                    others, grows_at = [], None
                try:
                    said = told.get(timeout=None if grows_at is None else max(grows_at - time.monotonic(), 0.0))
                except Empty:
                    continue
                if isinstance(said, BaseException):
                    raise said
                if isinstance(said, FunctionProcess):
                    if others and not said.is_concurrent:
                        grows_at = time.monotonic() + GROWS_AFTER_SECONDS
                    continue
                left -= 1
                yield said
        finally:
            waiting.clear()
            if left:
                self._end_busy()

    def _begin(self, members: list[_Member], calls: Sequence[list[Any]], waiting: deque[int], told: Any) -> None:
        for number, member in enumerate(members):
            arguments = (member, calls, waiting, told, number == 0)
            threading.Thread(target=self._work, args=arguments, name=f"calls of {self.name}", daemon=True).start()

    def _work(
        self, member: _Member, calls: Sequence[list[Any]], waiting: deque[int], told: SimpleQueue[Any], leads: bool
    ) -> None:
        """Answer what waits, in a thread of its own; what it is told is an answer, an error, or whose process is loaded."""
        with member.busy:  # from the call before it may still be loading
            try:
                process = member.process
                if waiting:
                    process.load()
                if leads:
                    told.put(process)
                for answer in process.answers(calls, waiting):
                    told.put(answer)
            except BaseException as error:
                told.put(error)

    def _end_busy(self) -> None:
        """Let nobody work on for a call whose answers nobody waits for."""
        with self._closing:
            for member in self._members:
                if member.busy.locked():
                    member.process.close()
                    if not self._closed:
                        member.process = self._process()

    def close(self) -> None:
        """End all processes, and answer no more."""
        with self._closing:
            self._closed = True
            for member in self._members:
                member.process.close()
