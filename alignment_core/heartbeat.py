"""Signs of progress of a long operation, for whoever ends it if there are none for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_LISTENER: ContextVar[Callable[[], None]] = ContextVar("listener of heartbeats")

T = TypeVar("T")


@contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Call ``listener`` at each :func:`beat` of this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def beat() -> None:
    """Show that a part of the operation is done."""
    _LISTENER.get(lambda: None)()


def beating(items: Iterable[T]) -> Iterator[T]:
    """The items, with a :func:`beat` for each."""
    for item in items:
        beat()
        yield item
