"""A user's function in several processes at once, of this machine and of the other nodes of a Ray cluster."""

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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from alignment_core.cores import usable_cores
from alignment_core.errors import InfrastructureError, Stopped, UserError
from alignment_core.user_code.dependencies import COUNTED
from alignment_core.user_code.process import FunctionProcess

if TYPE_CHECKING:
    from alignment_core.cluster.group import ActorGroup

log = logging.getLogger(__name__)

POOL = "alignment_core.user_code.pool:NodePool"
BATCH = 2
"""Calls of one batch, for each process of a node."""
TIMEOUTS = 4
"""Timeouts that a call may take: its process's start and its answer, both twice if the process ends."""
MODEL_BYTES = 1 << 30
"""A function whose process took more memory than this to load it holds a model: by default it has no second process."""
GROWS_AFTER_SECONDS = 0.25
"""If calls still wait so long after a function was loaded, it is loaded in more processes."""

R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True)
class PoolJob:
    """The parameters of another node's pool: ``files`` and ``path`` are the files that count and the path of imports here."""

    name: str
    timeout: float
    load_timeout: float
    field: str
    size: int | None
    files: dict[str, str]
    path: tuple[str, ...]


Elsewhere = Callable[[PoolJob], "Nodes | None"]
"""Starts the pools of a cluster's other nodes; None without other nodes."""


@dataclass
class _Member:
    worker: FunctionProcess | Node
    busy: threading.Lock = field(default_factory=threading.Lock)
    is_out: bool = False
    """Whether the function could not be loaded in this further process."""


class FunctionPool:
    """Calls the function ``name`` in up to ``size`` instances of :class:`FunctionProcess`, and in as many on each other node of
    a cluster. Close it; from any thread.

    All take calls from one queue, so a function that keeps state between calls keeps it per process. The first process starts
    with the first call, the others when calls wait; processes that cannot load the function are left out. A coroutine function
    has one process, which works on many calls concurrently.
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
        load_timeout: float | None = None,
    ) -> None:
        """``size`` is by default the number of cores, or 1 for a function that holds a model; ``files``, ``path`` and
        ``load_timeout`` as FunctionProcess has them."""
        counted = dict(COUNTED.get({}) if files is None else files)
        entries = tuple(entry or os.getcwd() for entry in sys.path) if path is None else tuple(path)
        loading = timeout if load_timeout is None else load_timeout
        self._job = PoolJob(name, timeout, loading, field, size, counted, entries)
        self._members = [_Member(self._process()) for _ in range(size or usable_cores())]
        self._elsewhere = None if size == 1 else elsewhere
        self._nodes: Nodes | None = None
        self._closing = threading.Lock()
        self._closed = False

    def _process(self) -> FunctionProcess:
        job = self._job
        return FunctionProcess(job.name, job.timeout, job.field, job.files, job.path, job.load_timeout)

    def answers(self, calls: Sequence[list[Any]]) -> Generator[tuple[int, Any]]:
        """As FunctionProcess.answers; for one caller at a time. Raises InfrastructureError if another node is lost."""
        if not calls:
            return
        queue = _Queue(calls)
        members = [member for member in self._members if not member.is_out]
        first = [member for member in members if member.worker.is_loaded][: len(calls)] or members[:1]
        others = [member for member in members if member not in first]
        remaining = len(calls)
        grows_at: float | None = None
        try:
            self._begin(first, queue, leads=True)
            while remaining:
                if grows_at is not None and time.monotonic() >= grows_at:
                    self._begin(others[: len(queue.waiting)], queue, leads=False)
                    if self._elsewhere is not None:
                        self._thread(self._find_nodes, queue)
                    others = []
                    grows_at = None
                wait = None if grows_at is None else max(grows_at - time.monotonic(), 0.0)
                try:
                    message = queue.messages.get(timeout=wait)
                except Empty:
                    continue
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message, _Loaded):
                    if others and self._job.size is None and message.memory > MODEL_BYTES:
                        others = []
                        self._stay_alone(message.member, message.memory)
                    if (others or self._elsewhere is not None) and not message.is_concurrent and grows_at is None:
                        grows_at = time.monotonic() + GROWS_AFTER_SECONDS
                    continue
                remaining -= 1
                yield message
        finally:
            queue.waiting.clear()
            if remaining:
                self._end_busy()

    def _stay_alone(self, only: _Member, memory: int) -> None:
        """Start no further processes here than that of ``only``."""
        for member in self._members:
            member.is_out = member is not only and isinstance(member.worker, FunctionProcess)
        log.warning(
            "%s: %r took %.1f GiB of memory to load, and has one process only; resources.reward_processes sets the number",
            self._job.field,
            self._job.name,
            memory / 2**30,
        )

    def _begin(self, members: Sequence[_Member], queue: _Queue, leads: bool) -> None:
        for number, member in enumerate(members):
            self._thread(self._work, member, queue, leads and number == 0)

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name=f"calls of {self._job.name}", daemon=True).start()

    def _work(self, member: _Member, queue: _Queue, leads: bool) -> None:
        """Answer waiting calls, in a thread of its own."""
        with member.busy:  # it may still be loading for the previous calls
            if member.is_out:
                return
            try:
                worker = member.worker
                if queue.waiting and not self._load(member, worker, leads):
                    return
                if leads:
                    queue.messages.put(_Loaded(member, worker.is_concurrent, worker.peak_memory))
                for answer in worker.answers(queue.calls, queue.waiting):
                    queue.messages.put(answer)
            except BaseException as error:
                queue.messages.put(error)

    def _load(self, member: _Member, worker: FunctionProcess | Node, leads: bool) -> bool:
        """Whether it can answer. A further process may fail to load: memory, a port or a lock may not be available twice."""
        try:
            worker.load()
        except (UserError, OSError) as error:
            with self._closing:
                is_replaced = member.worker is not worker  # no call waits for it any more
                if leads or self._closed or is_replaced:
                    raise
                member.is_out = True
            log.warning("%s; the processes that have loaded it continue without further ones", error)
        return not member.is_out

    def _find_nodes(self, queue: _Queue) -> None:
        """Let other nodes take part in these calls and in later ones."""
        elsewhere = self._elsewhere
        self._elsewhere = None
        try:
            nodes = elsewhere(self._job) if elsewhere else None
        except BaseException as error:
            queue.messages.put(error)
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
        """End the processes that work on abandoned calls."""
        with self._closing:
            for member in self._members:
                if member.busy.locked() and isinstance(member.worker, FunctionProcess):
                    member.worker.close()
                    if not self._closed:
                        member.worker = self._process()

    def close(self) -> None:
        """End all processes; later calls raise Stopped."""
        with self._closing:
            self._closed = True
            for member in self._members:
                member.worker.close()
            if self._nodes is not None:
                self._nodes.close()


class _Queue:
    """The calls of one ``answers``, and their results."""

    def __init__(self, calls: Sequence[list[Any]]) -> None:
        self.calls = calls
        self.waiting = deque(range(len(calls)))
        self.messages = SimpleQueue[Any]()
        """Answers with their numbers, errors, and a ``_Loaded``."""


@dataclass(frozen=True)
class _Loaded:
    member: _Member
    is_concurrent: bool
    memory: int
    """Bytes that its process took to load it."""


class NodePool:
    """The actor of a node: a pool."""

    def __init__(self, job: PoolJob) -> None:
        self.size = job.size or usable_cores()
        self._timeout = job.timeout
        self._pool = FunctionPool(
            job.name, job.timeout, job.field, job.size, job.files, path=job.path, load_timeout=job.load_timeout
        )

    def batch(self) -> tuple[int, float]:
        """Calls of one batch, and the seconds that each call adds if one process has to answer all."""
        return BATCH * self.size, TIMEOUTS * self._timeout

    def answers(self, calls: Sequence[list[Any]]) -> list[tuple[int, Any]]:
        """All answers, with the calls' numbers."""
        return list(self._pool.answers(calls))


class Node:
    """The pool of another node, with the interface of FunctionProcess. Raises InfrastructureError if it is lost."""

    is_loaded = True
    is_concurrent = False
    peak_memory = 0

    def __init__(self, group: ActorGroup[NodePool], index: int, timeout: float) -> None:
        """``timeout``: seconds for an answer, in addition to those of the function's calls."""
        self._group = group
        self._index = index
        self._timeout = timeout
        self._closed = False

    def load(self) -> None:
        """Nothing: the node's pool loads the function with its first call."""

    def answers(self, calls: Sequence[list[Any]], waiting: deque[int]) -> Generator[tuple[int, Any]]:
        """The answers to waiting calls, taken in batches until none waits."""
        most, seconds = self._call(self._timeout, NodePool.batch)
        while numbers := _next_batch(waiting, most):
            deadline = self._timeout + seconds * len(numbers)
            for position, answer in self._call(deadline, NodePool.answers, [calls[number] for number in numbers]):
                yield numbers[position], answer

    def _call(
        self, timeout: float, method: Callable[Concatenate[NodePool, P], R], /, *arguments: P.args, **named: P.kwargs
    ) -> R:
        """Raises Stopped once this is closed, because the actor is killed then."""
        try:
            if not self._closed:
                return self._group.one_within(timeout, self._index, method, *arguments, **named)
        except InfrastructureError:
            if not self._closed:
                raise
        raise Stopped("the pool was closed")

    def close(self) -> None:
        """Make no further calls."""
        self._closed = True


class Nodes:
    """The pools of all other nodes."""

    def __init__(self, group: ActorGroup[NodePool], timeout: float) -> None:
        """``timeout`` as for Node."""
        self._group = group
        self.workers = [Node(group, index, timeout) for index in range(group.size)]

    def close(self) -> None:
        """End the actors and all processes that they started."""
        for node in self.workers:
            node.close()
        self._group.kill()


def _next_batch(waiting: deque[int], most: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < most:
        try:
            numbers.append(waiting.popleft())
        except IndexError:
            break
    return numbers
