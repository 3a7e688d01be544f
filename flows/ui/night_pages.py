"""The page about nights: of each inbox, what every night took and what became of it, and production over time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from alignment.flows.ui.curves import Curve, curve
from alignment.flows.ui.rendering import page
from alignment_core.artifacts import Reference
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.artifacts.tag_history import TagMove
from alignment_core.evaluation.metric_names import METRICS
from alignment_core.nights.ledger import GIVEN_UP, History, Night

BEGINS, ENDS = "nightly/", "/nights"
A_PAGE = 50
READERS = 16
"""Entries that are read at once."""
SHOWN = ("accuracy", "reward", "win_rate", "judged_win_rate", "kl_to_model")
"""Metrics of the candidates that are drawn over the nights."""


@dataclass(frozen=True)
class Inbox:
    """The nights of one inbox, the latest first."""

    name: str
    nights: list[Night]
    total: int
    curves: list[Curve]
    waiting: int
    """Rows of the latest night without an outcome that wait because they are too few."""
    given_up: int
    """Batches of rows that no night takes until a user decides."""
    rollbacks: list[TagMove]
    """Moves back of the tags that its candidates were promoted to, the latest first."""


class NightPages:
    """Pages over the ledgers of a store."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot
        self._read: dict[Reference, Night] = {}
        """Entries by their artifacts, which never change."""

    def listed(self, request: Request) -> Response:
        """All inboxes; ``all`` in the address shows every night."""
        with self.snapshot.reading():
            names = [name for name in self.snapshot.tags if name.startswith(BEGINS) and name.endswith(ENDS)]
        most = None if "all" in request.query_params else A_PAGE
        inboxes = [self._inbox(name.removeprefix(BEGINS).removesuffix(ENDS), most) for name in sorted(names)]
        known: dict[str, Any] = {"problem": self.snapshot.problem, "age": self.snapshot.age, "snapshot": self.snapshot}
        return page(request, "nights.html", inboxes=inboxes, **known)

    def _inbox(self, name: str, most: int | None) -> Inbox:
        history = History(self.snapshot.store, name)
        moves = self.snapshot.histories.get(history.tag, [])
        with ThreadPoolExecutor(READERS) as pool:
            entries = list(pool.map(lambda move: self._entry(history, move.to), moves))
        tags = {
            move.name
            for entry in entries
            if entry.candidate and entry.state == "promoted"
            for move in self.snapshot.moves.get(entry.candidate, ())
        }
        decided = [entry for entry in entries if entry.metrics.get("candidate")]
        curves = []
        for metric in SHOWN:
            points = [
                (float(number), entry.metrics["candidate"][metric])
                for number, entry in enumerate(decided, start=1)
                if metric in entry.metrics["candidate"]
            ]
            if drawn := curve(METRICS[metric].title, points):
                curves.append(drawn)
        latest = entries[-1] if entries else None
        return Inbox(
            name,
            list(reversed(entries))[:most],
            len(entries),
            curves,
            latest.rows if latest is not None and latest.state == "empty" else 0,
            sum(entry.state == GIVEN_UP for entry in {entry.batch: entry for entry in entries if entry.batch}.values()),
            [move for tag in tags for move in reversed(self.snapshot.histories[tag]) if move.back_to],
        )

    def _entry(self, history: History, reference: Reference) -> Night:
        if reference not in self._read:
            self._read[reference] = history.read(reference)
        return self._read[reference]
