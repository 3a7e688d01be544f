"""How far a stage is, in one line of text, said often at first and then more rarely."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_SECONDS = 2.0
MOST_SECONDS = 30.0
SILENT_SECONDS = 10.0
"""Between two lines about a stage that reports no progress."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    done: float
    total: float | None
    """None while nobody knows."""
    unit: str
    """What is counted: ``steps``, ``shards``, …"""
    metrics: Mapping[str, float | None]
    """Such as ``loss``, ``grad_norm``, ``tokens_per_second``; None for what is not finite."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """The stage's key metrics: their titles by name."""


class Pace:
    """Decides when the next line about a stage is due: 2, 4, 8, 16, 32 s after its start, then every 30 s; every 10 s while it
    reports nothing."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said_at = self._began
        self._silent = True
        self._starting: tuple[str, float] | None = None
        self._latest: Progress | None = None
        self._base: tuple[float, Progress] | None = None

    def seen(self, progress: Progress) -> None:
        """Take note of how far the stage is."""
        before, self._latest = self._latest, progress
        self._silent, self._starting = False, None
        if before is None or before.unit != progress.unit or progress.done < before.done:
            self._base = self._clock(), progress  # a new count: its speed is its own

    def starts(self, what: str | None) -> None:
        """Take note of what is being started for the stage; None: nothing any more."""
        self._starting = None if what is None else (what, self._clock())

    def due(self, waits: bool = False) -> bool:
        """Whether a line should be said now; then the next one is due later. One that ``waits`` reports no progress anyway."""
        now = self._clock()
        most = SILENT_SECONDS if self._silent and not waits else MOST_SECONDS
        if now < self._said_at + min(most, max(FIRST_SECONDS, self._said_at - self._began)):
            return False
        self._said_at, self._silent = now, True
        return True

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return self._clock() - self._began

    @property
    def progress(self) -> Progress | None:
        """The latest, if there is any."""
        return self._latest

    @property
    def rate(self) -> float | None:
        """Units per second since the count began; None until something was counted."""
        if self._base is None or self._latest is None:
            return None
        since, first = self._base
        done, seconds = self._latest.done - first.done, self._clock() - since
        return done / seconds if done > 0 and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """To the end of the count, at this rate; None if nobody can know."""
        rate, latest = self.rate, self._latest
        if rate is None or latest is None or latest.total is None:
            return None
        return max(0.0, latest.total - latest.done) / rate

    def line(self) -> str:
        """Such as ``12/400 steps · reward 0.125 · 1.5 steps/s · 4 min 19 s left``."""
        latest = self._latest
        if self._starting is not None:
            what, since = self._starting
            return f"starts {what}, for {duration(self._clock() - since)} now"
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

    What a stage had at its start lies beside the metric, as ``<name>.first``.
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
    """Three significant digits at least, and never ``-0.000``."""
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
    one = unit.removesuffix("s")
    shown, per = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s per {one}")
    return f"{shown:,.0f} {per}" if shown >= 100 else f"{shown:.3g} {per}"
