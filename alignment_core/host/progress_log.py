"""Progress of a stage as lines of text, at growing intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_SECONDS = 2.0
MOST_SECONDS = 30.0
SILENT_SECONDS = 10.0
"""Interval of lines about a stage that reports no progress."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Progress:
    """The progress of a stage."""

    done: float
    total: float | None
    """None if unknown."""
    unit: str
    """Unit of the count: ``steps``, ``shards``, …"""
    metrics: Mapping[str, float | None]
    """Such as ``loss``, ``grad_norm``, ``tokens_per_second``; None if not finite."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """Titles of the stage's key metrics by name."""


class Pace:
    """Decides when the next line about a stage is due: 2, 4, 8, 16, 32 s after its start, then every 30 s, or every 10 s while
    there are no reports."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._last_line = self._began
        self._silent = True
        self._starting: tuple[str, float] | None = None
        self._latest: Progress | None = None
        self._base: tuple[float, Progress] | None = None

    def seen(self, progress: Progress) -> None:
        """Record a report of progress."""
        before = self._latest
        self._latest = progress
        self._silent = False
        self._starting = None
        if before is None or before.unit != progress.unit or progress.done < before.done:
            self._base = self._clock(), progress  # a new count, whose rate is measured separately

    def starts(self, component: str | None) -> None:
        """Record that a component starts for the stage; None: it is ready."""
        self._starting = None if component is None else (component, self._clock())

    def due(self, waits: bool = False) -> bool:
        """Whether a line is due now, which postpones the next one. A stage that ``waits`` is not expected to report."""
        now = self._clock()
        longest = SILENT_SECONDS if self._silent and not waits else MOST_SECONDS
        if now < self._last_line + min(longest, max(FIRST_SECONDS, self._last_line - self._began)):
            return False
        self._last_line = now
        self._silent = True
        return True

    @property
    def seconds(self) -> float:
        """Seconds since the start of the stage."""
        return self._clock() - self._began

    @property
    def progress(self) -> Progress | None:
        """The latest report, or None."""
        return self._latest

    @property
    def rate(self) -> float | None:
        """Units per second since the start of the count; None before the first unit."""
        if self._base is None or self._latest is None:
            return None
        since, first = self._base
        done, seconds = self._latest.done - first.done, self._clock() - since
        return done / seconds if done > 0 and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the count at this rate; None if unknown."""
        rate, latest = self.rate, self._latest
        if rate is None or latest is None or latest.total is None:
            return None
        return max(0.0, latest.total - latest.done) / rate

    def line(self) -> str:
        """Such as ``12/400 steps · reward 0.125 · 1.5 steps/s · 4 min 19 s left``."""
        latest = self._latest
        if self._starting is not None:
            component, since = self._starting
            return f"starts {component}, for {duration(self._clock() - since)} now"
        if latest is None:
            return f"runs for {duration(self.seconds)}"
        of_total = f"/{latest.total:,.0f}" if latest.total else ""
        parts = [f"{latest.done:,.0f}{of_total} {latest.unit}", headline(latest.shows, latest.metrics)]
        if self.rate is not None:
            parts.append(_speed(self.rate, latest.unit))
        if (tokens := latest.metrics.get("tokens_per_second")) is not None:
            parts.append(f"{tokens:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return " · ".join(part for part in parts if part)


def headline(shows: Mapping[str, str], metrics: Mapping[str, Any]) -> str:
    """The key metrics of a stage, such as ``reward 0.12 → 0.83 · KL 0.01``; ``shows`` gives their titles by name.

    The value at the start of a stage is ``<name>.first`` among the metrics.
    """
    parts = []
    for name, title in shows.items():
        value, first = metrics.get(name), metrics.get(f"{name}.first")
        if isinstance(value, str):
            parts.append(f"{title} {value}")
        elif value is not None:
            parts.append(f"{title} {f'{number(first)} → ' if first is not None else ''}{number(value)}")
    return " · ".join(parts)


def number(value: float) -> str:
    """A number with at least three significant digits, never ``-0.000``."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0.000"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Such as ``45 s``, ``4 min 19 s`` or ``2 h 5 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _speed(rate: float, unit: str) -> str:
    singular = unit.removesuffix("s")
    shown, per = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s per {singular}")
    return f"{shown:,.0f} {per}" if shown >= 100 else f"{shown:.3g} {per}"
