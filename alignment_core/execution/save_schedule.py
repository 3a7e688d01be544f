"""When a training loop saves its progress, and how long that takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from alignment_core.execution.base import StageContext
from alignment_core.files import write_whole

LEAST_SECONDS = 60.0
MULTIPLE = 20
"""Least interval between saves, in durations of the last one: saving takes less than 5 % of the time for any size of model."""


def pause_after(save_seconds: float) -> float:
    """Seconds from the end of a save that took ``save_seconds`` to the begin of the next one."""
    return max(LEAST_SECONDS, MULTIPLE * save_seconds)


class SaveSchedule:
    """Measures the saves of a stage. The progress folder keeps the duration of the last one, for attempts that resume."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._file = context.progress / "save-seconds.json"
        self._seconds = 0.0
        with suppress(OSError, ValueError, TypeError):
            self._seconds = float(json.loads(self._file.read_text()))
            context.saved("save", self._seconds)
        self._ended = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether to save now."""
        given = self._context.resources.progress_seconds
        return time.monotonic() - self._ended > (pause_after(self._seconds) if given is None else given)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the save in the block."""
        started = time.monotonic()
        yield
        self._ended = time.monotonic()
        self._seconds = self._ended - started
        cost = self._context.cost
        cost["save_seconds"] = round(cost.get("save_seconds", 0.0) + self._seconds, 3)
        with suppress(OSError):  # a full disk: the checkpoint counts without it
            write_whole(self._file, lambda file: file.write(json.dumps(round(self._seconds, 3)).encode()))
        self._context.saved("save", self._seconds)
