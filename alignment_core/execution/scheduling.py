"""The order in which stages get machines: of those that wait, the stage that was submitted first."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from alignment_core.journal import short_id


@dataclass(frozen=True)
class RunName:
    """The run that a stage belongs to, as other runs on this machine name it."""

    id: str = ""
    recipe: str = ""

    def __str__(self) -> str:
        recipe = f" ({self.recipe})" if self.recipe else ""
        return f"run {short_id(self.id)}{recipe}" if self.id else f"another run{recipe}"


START_OF_ACTORS = "the start of its actors"
"""Label of the ticket that starts a run's actors before its stages; waiting for it counts as start-up."""


@dataclass(frozen=True)
class Ticket:
    """A stage's right to machines, in the order of the stages of its run."""

    order: int = 0
    """Number of the stage in the order of submission; the smallest number that waits goes first."""
    waits: Callable[[str | None], None] = lambda _: None
    """Called with the reason of a wait when it begins or its reason changes, and with None when it ends."""
    label: str = ""
    """The stage's label in the recipe, for people."""
    run: RunName = RunName()
    starts: Callable[[str | None], None] = lambda _: None
    """Called with a description of the actors that are being started for the stage, and with None once they are ready."""
    used: Callable[[float], None] = lambda _: None
    """Called with the device-seconds for which the stage held trainers or engines."""

    @contextmanager
    def starting(self, what: str) -> Iterator[None]:
        """The context in which something is started for the stage."""
        self.starts(what)
        try:
            yield
        finally:
            self.starts(None)


FIRST = Ticket()


class OrderedLock:
    """A lock that goes to the earliest stage among those that wait for it, not to the first caller."""

    def __init__(self, name: str = "the machine") -> None:
        """``name`` describes the locked thing in reasons of waits."""
        self.name = name
        self._condition = threading.Condition()
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._taken = False
        self._holder = ""

    @contextmanager
    def hold(self, ticket: Ticket) -> Iterator[Callable[[], None]]:
        """Hold the lock. Call the yielded function to let an earlier stage go first, if one waits by now."""
        self._enter(ticket)

        def give_way() -> None:
            with self._condition:
                earlier = any(order < ticket.order for order, _ in self._waiting)
            if earlier:
                self._leave()
                self._enter(ticket)

        try:
            yield give_way
        finally:
            self._leave()

    def _enter(self, ticket: Ticket) -> None:
        position = (ticket.order, next(self._arrivals))
        with self._condition:
            self._waiting.append(position)
            try:
                reason = ""
                while not self._is_free_for(position):
                    if self._holder or not reason:  # between two holders the reason stays that of the last one
                        reason = self._report(ticket, reason)
                    self._condition.wait()
                if reason:
                    ticket.waits(None)
                self._taken = True
                self._holder = ticket.label
            finally:
                self._waiting.remove(position)
                self._condition.notify_all()  # if this stage was the first in line and failed, the next one must wake up

    def _report(self, ticket: Ticket, before: str) -> str:
        """The reason of a wait, which is reported if it is not that of ``before``."""
        reason = f"{self.name}, in use by {self._holder or 'another stage'}"
        if reason != before:
            ticket.waits(reason)
        return reason

    def _is_free_for(self, position: tuple[int, int]) -> bool:
        return not self._taken and min(self._waiting) == position

    def _leave(self) -> None:
        with self._condition:
            self._taken = False
            self._holder = ""
            self._condition.notify_all()
