"""Where the time of a stage goes, by part: a part within another counts for itself alone."""

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
        """Count the time of the block as this part's, less that of the parts within it."""
        outer = getattr(self._within, "seconds", 0.0)
        self._within.seconds, started = 0.0, time.monotonic()
        try:
            yield
        finally:
            taken = time.monotonic() - started
            self.seconds[name] += taken - self._within.seconds
            self._within.seconds = outer + taken
