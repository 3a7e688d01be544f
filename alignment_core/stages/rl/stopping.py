"""The end of a call that is under way when the run is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 0.2
"""How long such a call goes on."""


@contextmanager
def ended_when(stopping: threading.Event, *end: Callable[[], None]) -> Iterator[None]:
    """Once ``stopping`` is set, call all of ``end`` from another thread, again and again: a next call has no time either."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SECONDS):
            if stopping.is_set():
                for one in end:
                    one()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
