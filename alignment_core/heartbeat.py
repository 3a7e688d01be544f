"""Signs of progress of a long operation, for whoever ends it if there are none for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_LISTENER: ContextVar[Callable[[], None]] = ContextVar("listener of heartbeats")

T = TypeVar("T")


@contextmanager
def listening(called: Callable[[], None]) -> Iterator[None]:
    """Call ``called`` at each :func:`beat` of this thread."""
    token = _LISTENER.set(called)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def beat() -> None:
    """Show that a part of the operation is done."""
    listener()()


def listener() -> Callable[[], None]:
    """The listener of this thread, for other threads that work for it."""
    return _LISTENER.get(lambda: None)


def beating(items: Iterable[T]) -> Iterator[T]:
    """The items, with a :func:`beat` for each."""
    for item in items:
        beat()
        yield item
