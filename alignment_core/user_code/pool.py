"""A user's function in several processes at once: a pool that grows when calls wait."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from alignment_core.errors import UserError
from alignment_core.user_code.dependencies import COUNTED
from alignment_core.user_code.process import FunctionProcess

log = logging.getLogger(__name__)

GROWS_AFTER_SECONDS = 0.25
"""Once a function is loaded: if calls still wait by then, it is worth it to load it in more processes."""


class Worker(Protocol):
    """What answers calls: a process of this machine, or of another node."""

    @property
    def is_loaded(self) -> bool:
        """Whether it can answer at once."""

    @property
    def is_concurrent(self) -> bool:
        """Whether it works on many calls at a time by itself."""

    def load(self) -> None:
        """Make it so that it can. Raises UserError."""

    def answers(self, calls: Sequence[list[Any]], waiting: deque[int]) -> Generator[tuple[int, Any]]:
        """The answers to those of the calls that it takes from ``waiting``."""

    def close(self) -> None:
        """Answer no more. From any thread."""


class Workers(Protocol):
    """Those of other nodes."""

    @property
    def workers(self) -> Sequence[Worker]:
        """One for each node."""

    def close(self) -> None:
        """End them. From any thread."""


@dataclass(frozen=True)
class PoolJob:
    """What the pool of another node is made of: ``files`` and ``path`` are what counts here, and where imports look here."""

    name: str
    timeout: float
    field: str
    size: int | None
    files: dict[str, str]
    path: tuple[str, ...]


Elsewhere = Callable[[PoolJob], Workers | None]
"""Starts the pools of a cluster's other nodes; None where there are none."""


@dataclass
class _Member:
    worker: Worker
    busy: threading.Lock = field(default_factory=threading.Lock)
    is_out: bool = False
    """Whether the function could not be loaded once more, in this one."""


class FunctionPool:
    """Calls the function ``name`` in up to ``size`` processes, each as :class:`FunctionProcess` has it, and in as many on each
    other node of a cluster; close it, from any thread.

    All answer from one queue, so what each of them is asked depends on who is free: a function that remembers something from
    call to call does so in each process for itself. The first process starts with the first call, the others when calls wait;
    those that cannot load the function once more are done without.
    A coroutine function has one process, which works on many calls at a time.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        field: str,
        size: int | None = 1,
        files: dict[str, str] | None = None,
        path: Sequence[str] | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """``size`` is by default the number of cores; ``files`` and ``path`` as FunctionProcess has them."""
        found = dict(COUNTED.get({}) if files is None else files)
        entries = tuple(one or os.getcwd() for one in sys.path) if path is None else tuple(path)
        self._job = PoolJob(name, timeout, field, size, found, entries)
        self._members = [_Member(self._process()) for _ in range(size or len(os.sched_getaffinity(0)))]
        self._elsewhere = None if size == 1 else elsewhere
        self._nodes: Workers | None = None
        self._closing, self._closed = threading.Lock(), False

    def _process(self) -> FunctionProcess:
        job = self._job
        return FunctionProcess(job.name, job.timeout, job.field, job.files, job.path)

    def answers(self, calls: Sequence[list[Any]]) -> Generator[tuple[int, Any]]:
        """As FunctionProcess.answers, one call of this at a time. Raises InfrastructureError if another node is lost."""
        if not calls:
            return
        queue = _Queue(calls)
        members = [one for one in self._members if not one.is_out]
        first = [one for one in members if one.worker.is_loaded][: len(calls)] or members[:1]
        others, left = [one for one in members if one not in first], len(calls)
        grows_at: float | None = None
        try:
            self._begin(first, queue, leads=True)
            while left:
                if grows_at is not None and time.monotonic() >= grows_at:
                    self._begin(others[: len(queue.waiting)], queue, leads=False)
                    if self._elsewhere is not None:
                        self._thread(self._find_nodes, queue)
                    others, grows_at = [], None
                try:
                    message = queue.told.get(
                        timeout=None if grows_at is None else max(grows_at - time.monotonic(), 0.0)
                    )
                except Empty:
                    continue
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message, _Loaded):
                    if (others or self._elsewhere is not None) and not message.is_concurrent and grows_at is None:
                        grows_at = time.monotonic() + GROWS_AFTER_SECONDS
                    continue
                left -= 1
                yield message
        finally:
            queue.waiting.clear()
            if left:
                self._end_busy()

    def _begin(self, members: Sequence[_Member], queue: _Queue, leads: bool) -> None:
        for number, member in enumerate(members):
            self._thread(self._work, member, queue, leads and number == 0)

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name=f"calls of {self._job.name}", daemon=True).start()

    def _work(self, member: _Member, queue: _Queue, leads: bool) -> None:
        """Answer what waits, in a thread of its own."""
        with member.busy:  # from the call before it may still be loading
            if member.is_out:
                return
            try:
                worker = member.worker
                if queue.waiting and not self._load(member, worker, leads):
                    return
                if leads:
                    queue.told.put(_Loaded(worker.is_concurrent))
                for answer in worker.answers(queue.calls, queue.waiting):
                    queue.told.put(answer)
            except BaseException as error:
                queue.told.put(error)

    def _load(self, member: _Member, worker: Worker, leads: bool) -> bool:
        """Whether it can answer. One that would only help need not: memory, a port or a lock may not be there twice."""
        try:
            worker.load()
        except (UserError, OSError) as error:
            with self._closing:
                if leads or self._closed or member.worker is not worker:  # as nobody waits for it any more
                    raise
                member.is_out = True
            log.warning("%s; the processes that have loaded it continue without further ones", error)
        return not member.is_out

    def _find_nodes(self, queue: _Queue) -> None:
        """Have other nodes answer, too: in this call, and in those after it."""
        elsewhere, self._elsewhere = self._elsewhere, None
        try:
            nodes = elsewhere(self._job) if elsewhere else None
        except BaseException as error:
            queue.told.put(error)
            return
        if nodes is None:
            return
        with self._closing:
            self._nodes = nodes
            if self._closed:
                nodes.close()
                return
            members = [_Member(worker) for worker in nodes.workers]
            self._members += members
        for member in members:
            self._thread(self._work, member, queue, False)

    def _end_busy(self) -> None:
        """Let nobody work on for a call whose answers nobody waits for."""
        with self._closing:
            for member in self._members:
                if member.busy.locked() and isinstance(member.worker, FunctionProcess):
                    member.worker.close()
                    if not self._closed:
                        member.worker = self._process()

    def close(self) -> None:
        """End all processes, and answer no more."""
        with self._closing:
            self._closed = True
            for member in self._members:
                member.worker.close()
            if self._nodes is not None:
                self._nodes.close()


class _Queue:
    """The calls of one time, and what becomes of them."""

    def __init__(self, calls: Sequence[list[Any]]) -> None:
        self.calls, self.waiting = calls, deque(range(len(calls)))
        self.told = SimpleQueue[Any]()
        """Answers with their numbers, errors, and that the function is loaded."""


@dataclass(frozen=True)
class _Loaded:
    is_concurrent: bool
