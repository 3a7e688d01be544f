"""Who may use a machine next: the stage that was submitted first, among those that wait."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A stage's place among the stages of its run."""

    order: int = 0
    """Number of the stage in the order of submission; the smallest one that waits goes first."""
    waits: Callable[[bool], None] = lambda _: None
    """Called with True when the stage begins to wait, and with False when its turn has come."""


FIRST = Turn()


class Turnstile:
    """A lock that goes to the earliest stage that waits for it, not to whoever happens to ask first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._taken = False

    @contextmanager
    def through(self, turn: Turn) -> Iterator[Callable[[], None]]:
        """Hold the lock; what this yields lets an earlier stage go first, if one waits by now."""
        self._enter(turn)

        def give_way() -> None:
            with self._condition:
                earlier = any(order < turn.order for order, _ in self._waiting)
            if earlier:
                self._leave()
                self._enter(turn)

        try:
            yield give_way
        finally:
            self._leave()

    def _enter(self, turn: Turn) -> None:
        place = (turn.order, next(self._arrivals))
        with self._condition:
            self._waiting.append(place)
            try:
                if not self._is_free_for(place):
                    turn.waits(True)
                    self._condition.wait_for(lambda: self._is_free_for(place))
                    turn.waits(False)
                self._taken = True
            finally:
                self._waiting.remove(place)
                self._condition.notify_all()  # had this been the first in line and failed, the next one must hear of it

    def _is_free_for(self, place: tuple[int, int]) -> bool:
        return not self._taken and min(self._waiting) == place

    def _leave(self) -> None:
        with self._condition:
            self._taken = False
            self._condition.notify_all()
