"""The time of a stage by part; the time of a nested part does not count for the outer one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by part, over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block for this part, without that of nested parts."""
        outer = getattr(self._within, "seconds", 0.0)
        self._within.seconds = 0.0
        started = time.monotonic()
        try:
            yield
        finally:
            elapsed = time.monotonic() - started
            self.seconds[name] += elapsed - self._within.seconds
            self._within.seconds = outer + elapsed
