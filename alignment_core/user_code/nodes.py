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
"""Calls that a node is given at a time, for each of its processes."""
TIMEOUTS = 4
"""That a call may take: its process's start and its answer, both a second time where the process ends."""

R = TypeVar("R")
P = ParamSpec("P")


class NodePool:
    """What an actor holds."""

    def __init__(self, job: PoolJob) -> None:
        self.size, self._timeout = job.size or len(os.sched_getaffinity(0)), job.timeout
        self._pool = FunctionPool(job.name, job.timeout, job.field, self.size, job.files, path=job.path)

    def batch(self) -> tuple[int, float]:
        """How many calls to ask for at a time, and the seconds that each of them adds if one process has to answer all."""
        return BATCH * self.size, TIMEOUTS * self._timeout

    def answers(self, calls: Sequence[list[Any]]) -> list[tuple[int, Any]]:
        """All answers, by number."""
        return list(self._pool.answers(calls))


class Node:
    """The pool of one other node, called as the processes of this one are. Raises InfrastructureError if it is lost."""

    is_loaded, is_concurrent = True, False

    def __init__(self, group: ActorGroup[NodePool], index: int, timeout: float) -> None:
        """``timeout``: seconds for an answer, beside those that the function's calls may take."""
        self._group, self._index, self._timeout, self._closed = group, index, timeout, False

    def load(self) -> None:
        """It does so by itself."""

    def answers(self, calls: Sequence[list[Any]], waiting: deque[int]) -> Generator[tuple[int, Any]]:
        """Take what waits, in batches, until nothing does."""
        most, seconds = self._ask(self._timeout, NodePool.batch)
        while numbers := _taken(waiting, most):
            deadline = self._timeout + seconds * len(numbers)
            for position, answer in self._ask(deadline, NodePool.answers, [calls[number] for number in numbers]):
                yield numbers[position], answer

    def _ask(
        self, timeout: float, method: Callable[Concatenate[NodePool, P], R], /, *arguments: P.args, **named: P.kwargs
    ) -> R:
        """Raises Stopped once this is closed, as the actor is killed then."""
        try:
            if not self._closed:
                return self._group.one_within(timeout, self._index, method, *arguments, **named)
        except InfrastructureError:
            if not self._closed:
                raise
        raise Stopped("the pool was closed")

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed = True


class Nodes:
    """The pools of all other nodes, until it is closed."""

    def __init__(self, group: ActorGroup[NodePool], timeout: float) -> None:
        """``timeout`` as Node has it."""
        self._group = group
        self.workers = [Node(group, index, timeout) for index in range(group.size)]

    def close(self) -> None:
        """End the actors, and with them all that they started."""
        for node in self.workers:
            node.close()
        self._group.kill()


def _taken(waiting: deque[int], most: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < most:
        try:
            numbers.append(waiting.popleft())
        except IndexError:
            break
    return numbers
