"""A user's function on the other nodes of a Ray cluster: each has an actor with a pool of that node's cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import InfrastructureError, Stopped
from alignment_core.user_code.pool import FunctionPool, PoolJob

POOL = "alignment_core.user_code.nodes:NodePool"
BATCH = 2
"""Calls of one batch, for each process of a node."""
TIMEOUTS = 4
"""Timeouts that a call may take: its process's start and its answer, both twice if the process ends."""

R = TypeVar("R")
P = ParamSpec("P")


class NodePool:
    """The actor of a node: a pool."""

    def __init__(self, job: PoolJob) -> None:
        self.size = job.size or len(os.sched_getaffinity(0))
        self._timeout = job.timeout
        self._pool = FunctionPool(job.name, job.timeout, job.field, self.size, job.files, path=job.path)

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
