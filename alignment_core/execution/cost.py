"""The cost of a stage: how it is measured, and the names of its entries in provenance, results and tables.

Every stage has

- ``seconds``: time of its work, from request to end without the next two; ``startup_seconds``: the start of the run host and
  of actors for it; ``waited_seconds``: waits for machines, memory and other runs;
- ``device_seconds``: time during which it held trainers or engines, times their devices (GPUs, or ranks and engines on a CPU).

Stages add the tokens that they processed (``TOKENS``): ``prompt_tokens`` and ``completion_tokens`` of sampling (a prompt counts
once, however many completions it has), ``train_tokens`` of training steps, ``score_tokens`` of forward passes without training.
Only tokens that this run computed count, not those in the progress of an interrupted one. Times are sums over all attempts at
the stage, tokens those of the last one. ``train_computed_tokens`` and ``score_computed_tokens`` count shared prefixes once, and
padding. Names like ``train_seconds`` are parts of the stage's time (``save_seconds`` is that of saving progress while it
trains), ``train_processor_seconds`` and the like are the processor time of its trainers or engines meanwhile, whatever else
their cores do (those of tensor-parallel engines are not recorded), and ``steps`` is the number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from alignment_core.execution.scheduling import START_OF_ACTORS, Ticket

TOKENS = ("prompt_tokens", "completion_tokens", "train_tokens", "score_tokens")
TOTALS = ("seconds", "startup_seconds", "waited_seconds", "device_seconds", *TOKENS)

PARTS = {"startup_seconds": "start-up", "waited_seconds": "waiting", "seconds": "work"}
"""The parts of a stage's time, with their titles."""


class Meter:
    """Measures one stage from now on; pass its ``ticket`` to the machines."""

    def __init__(self, ticket: Ticket, requested: float | None = None) -> None:
        """``requested`` is the time of the monotonic clock at which the stage was requested; its host started since then."""
        self._report_wait = ticket.waits
        self._report_start = ticket.starts
        now = time.monotonic()
        self._started = now if requested is None else requested
        self._startup = now - self._started
        self._starts_since: float | None = None
        self._waits_since: float | None = None
        self._waits_for_start = False
        self._waited = self._device_seconds = 0.0
        self.ticket = replace(ticket, waits=self._waits, used=self._used, starts=self._starts)

    def _waits(self, reason: str | None) -> None:
        now = time.monotonic()
        if self._waits_since is not None and self._waits_for_start:
            self._startup += now - self._waits_since
        elif self._waits_since is not None:
            self._waited += now - self._waits_since
        self._waits_since = None if reason is None else now
        self._waits_for_start = reason is not None and reason.endswith(START_OF_ACTORS)
        self._report_wait(reason)

    def _starts(self, what: str | None) -> None:
        now = time.monotonic() - self._waited
        if self._starts_since is not None:
            self._startup += now - self._starts_since
        self._starts_since = None if what is None else now
        self._report_start(what)

    def _used(self, device_seconds: float) -> None:
        self._device_seconds += device_seconds

    def cost(self) -> dict[str, float]:
        """The entries that every stage has."""
        values = {
            "seconds": time.monotonic() - self._started - self._startup - self._waited,
            "startup_seconds": self._startup,
            "waited_seconds": self._waited,
            "device_seconds": self._device_seconds,
        }
        return {name: round(value, 3) for name, value in values.items()}


def times(cost: Mapping[str, float]) -> str:
    """Such as ``41.1 s (start-up 36.1 s, waiting 3.0 s, work 2.0 s)``: the whole time, and its parts if it is not all work."""
    parts = {title: cost.get(name, 0.0) for name, title in PARTS.items()}
    shown = [f"{title} {value:.1f} s" for title, value in parts.items() if value >= 0.05 or title == "work"]
    whole = f"{sum(parts.values()):.1f} s"
    return f"{whole} ({', '.join(shown)})" if len(shown) > 1 else whole


def tokens(cost: Mapping[str, float]) -> float:
    """All tokens that a stage processed."""
    return sum(cost.get(name, 0.0) for name in TOKENS)


def per_step(cost: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by part, as far as the stage measured them."""
    steps = cost.get("steps", 0.0)
    if not steps:
        return {}
    ending = "_seconds"
    parts = {
        name.removesuffix(ending): value for name, value in cost.items() if name.endswith(ending) and name not in TOTALS
    }
    return {name: value / steps for name, value in parts.items()}


def total(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of a run, over the costs of the stages that ran in it."""
    listed = list(costs)
    return {name: round(sum(cost.get(name, 0.0) for cost in listed), 3) for name in TOTALS}
