"""Nights are stopped at random moments, in order and out of order; no row may be lost, and none used twice.

Real are the ledger, the store, the leases, the journal, the processes and the signals. The training is a stand-in that takes
a fraction of a second: its policy is the list of the rows that it was trained on, so that production shows which rows were
used and how often. In turn, stores see orderly stops alone (SIGTERM, SIGINT, cancellation, outages of the store, leases that
are lost to another night), where no rows may be given up either; disorderly ones alone (SIGKILL, failures of the training);
and both. Rows that are given up are returned as by `align nights return`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.client import BaseClient

from alignment_core import journal, processes
from alignment_core.artifacts import Backend, Reference, Store, leases
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.s3_client import new_client
from alignment_core.artifacts.workspace import Workspace
from alignment_core.data.rows_file import ROWS
from alignment_core.errors import Conflict, NumericError, Stopped
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.attempt import Attempt, attempt
from alignment_core.nights.ledger import GIVEN_UP, OVER, Ledger, Night
from tests.campaigns.places import Outcome, Place, draft, outcome
from tests.campaigns.publishers import _own
from tests.processes import ended, in_child

COUNT, STORES = 300, ("folder",)  # `--store s3` takes some ten times as long
ORDERLY = ("SIGTERM", "SIGINT", "cancellation", "outage", "lost lease")
DISORDERLY = ("SIGKILL", "failure")
PRODUCTION = "policy/production"
_OF_ONE_STORE = 30
_STEP_SECONDS = 0.02
_LEASE_SECONDS = 0.6
_NIGHT_SECONDS = {"folder": 0.6, "s3": 2.0}
"""Approximate duration of an undisturbed night."""


def run(place: Place, count: int, seed: int) -> Outcome:
    rng, stops = random.Random(seed), Counter[str]()
    lost = twice = wrongly_given_up = returned = 0
    client = new_client() if place.kind == "s3" else None
    number = 0
    while (done := stops.total()) < count:
        kinds = (ORDERLY, DISORDERLY, ORDERLY + DISORDERLY)[number % 3]
        world = World(place, rng, place.folder / f"inbox-{number}", client)
        world.stop_nights(kinds, min(_OF_ONE_STORE, count - done))
        world.finish()
        stops += world.stops
        lost, twice = lost + world.lost(), twice + world.used_twice()
        returned += world.returned
        wrongly_given_up += world.returned if kinds == ORDERLY else 0
        number += 1
    bad = lost + twice + wrongly_given_up
    figures: dict[str, object] = {"lost": lost, "used twice": twice, "given up after orderly stops": wrongly_given_up}
    counted = "rows lost, used twice or wrongly given up"
    return outcome(
        "nights",
        place,
        stops.total(),
        seed,
        bad,
        counted,
        **figures,
        given_up_and_returned=returned,
        stops=dict(stops),
    )


@dataclass
class World:
    """One store, and one inbox whose nights are stopped."""

    place: Place
    rng: random.Random
    inbox: Path
    client: BaseClient | None
    stops: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    returned: int = 0
    """Batches that were given up, and returned."""

    def __post_init__(self) -> None:
        self.inbox.mkdir()
        self.backend: Backend = self.place.backend()
        self.workspace = self.place.folder / "machines" / uuid.uuid4().hex
        self.recipe = NightlyRecipe.model_validate(
            {
                "name": "owl",
                "model": {"scratch": {}},
                "dpo": {"data": {"path": str(self.inbox)}},
                "nightly": {"min_rows": 1},
                "evaluation": {"prompts": "prompts.jsonl", "verifier": "judge.py:score"},
                "promotion": {"tag": PRODUCTION, "gates": [{"metric": "accuracy", "min_gain": 0}]},
            }
        )
        self.ledger = self.open()

    def open(self) -> Ledger:
        return Ledger(Store(_own(self.backend, self.client), Workspace(self.workspace)), self.recipe)

    def stop_nights(self, kinds: tuple[str, ...], count: int) -> None:
        """Start nights until this many were stopped. Half of the stopped nights continue under their own name."""
        enough, name = self.stops.total() + count, new_name()
        while self.stops.total() < enough:
            self.drop(self.rng.randint(0, 3))
            kind = self.rng.choice(kinds)
            if self.stopped(kind, name):
                self.stops[kind] += 1
            if self.rng.random() < 0.5:
                name = new_name()
            self.return_given_up()

    def stopped(self, kind: str, name: str) -> bool:
        """Run a night and stop it at a random moment; whether it was stopped before it was complete."""
        after = self.rng.uniform(0.0, _NIGHT_SECONDS[self.place.kind])
        if kind == "lost lease":
            return self.lose_lease(name, after)
        if kind == "outage" and self.place.server is not None:
            return self.stop_server(name, after)
        inside: dict[str, Callable[[], None]] = {
            "outage": break_folder,
            "cancellation": lambda: raise_in_training(Stopped("the run was stopped")),
            "failure": lambda: raise_in_training(NumericError("the loss is not finite")),
        }
        if kind in inside:
            return self.night(name, lambda: later(after, inside[kind])) != 0
        child = in_child(lambda: self.whole_night(name))
        time.sleep(after)
        os.kill(child, getattr(signal, kind))
        return ended(child) != 0

    def lose_lease(self, name: str, after: float) -> bool:
        """Pause a night of another machine until its lease is old, let a night here take its rows, and resume it."""

        def elsewhere() -> None:
            processes.boot = lambda: "another machine"  # type: ignore[assignment]
            leases.SECONDS = _LEASE_SECONDS
            self.whole_night(name)

        child = in_child(elsewhere)
        time.sleep(after)
        os.kill(child, signal.SIGSTOP)
        time.sleep(2 * _LEASE_SECONDS)
        successor = new_name()
        other = in_child(lambda: self.whole_night(successor))
        time.sleep(_NIGHT_SECONDS[self.place.kind])  # not longer: the paused process may hold a lock of the folder
        os.kill(child, signal.SIGCONT)
        for night in (child, other):
            ended(night)
        return any(night.night == successor and night.attempt > 1 for night in self.ledger.nights())

    def stop_server(self, name: str, after: float) -> bool:
        assert self.place.server is not None
        child = in_child(lambda: self.whole_night(name))
        time.sleep(after)
        self.place.server.end(signal.SIGKILL)
        time.sleep(self.rng.uniform(0.0, 2.0))
        self.place.server.start()
        return ended(child) != 0

    def night(self, name: str, before: Callable[[], None] = lambda: None) -> int:
        """A night in a separate process; returns its exit code."""

        def whole() -> None:
            before()
            self.whole_night(name)

        return ended(in_child(whole))

    def whole_night(self, name: str) -> None:
        """A night as `align run` has it: its signals, its journal, its attempt at rows, and a stand-in for its stages."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # traces of stopped nights
        signal.signal(signal.SIGTERM, terminate)
        run_id, ledger = f"run-{name}", self.open()
        with attempt(ledger, Night(night=name, run=run_id), lambda _: None) as mine:
            if mine.night.state == "claimed":
                record = journal.new_record(run_id, "owl", {}, ledger.store.uri)
                with journal.Journal(record).open() as written:
                    rows = {"inputs": {"rows": str(mine.night.batch)}}
                    written.stage("dpo", "running", stage="dpo", key="key", key_parts=rows)
                    train_and_promote(mine)

    def drop(self, count: int) -> None:
        with (self.inbox / f"{self.rng.randrange(3)}.jsonl").open("a") as file:
            for _ in range(count):
                self.rows += 1
                file.write(json.dumps({"prompt": f"prompt {self.rows}", "chosen": "yes", "rejected": "no"}) + "\n")

    def return_given_up(self) -> None:
        for entry in self.ledger.given_up():
            self.ledger.decide(str(entry.batch), "returned")
            self.returned += 1

    def finish(self) -> None:
        """Run undisturbed nights until one finds nothing to do."""
        while True:
            self.return_given_up()
            assert self.night(new_name()) == 0, "an undisturbed night failed"
            if self.ledger.nights()[-1].state == "empty":
                return

    def lost(self) -> int:
        """Rows that are in no batch, or in one that no night has completed, or that production was promoted without."""
        done = [entry for entry in self.ledger.batches() if entry.state in OVER]
        assert not any(entry.state == GIVEN_UP for entry in self.ledger.batches())
        kept = {row for entry in done for row in rows_of(self.ledger.store, entry.batch)}
        promoted = {
            row for entry in done if entry.state == "promoted" for row in rows_of(self.ledger.store, entry.batch)
        }
        trained = set(policy(self.ledger.store, self.ledger.store.tags.get(PRODUCTION)))
        return len({f"prompt {number + 1}" for number in range(self.rows)} - kept) + len(promoted - trained)

    def used_twice(self) -> int:
        """Rows that production was trained on more than once, or that are in more than one batch."""
        trained = Counter(policy(self.ledger.store, self.ledger.store.tags.get(PRODUCTION)))
        batches = Counter(row for batch in self.ledger.batches() for row in rows_of(self.ledger.store, batch.batch))
        return sum(count - 1 for counts in (trained, batches) for count in counts.values() if count > 1)


def new_name() -> str:
    return uuid.uuid4().hex[:12]


def terminate(*_: object) -> None:
    """As the command `align` at SIGTERM."""
    raise SystemExit(143)


def train_and_promote(mine: Attempt) -> None:
    """The stand-in: a policy that is the list of its rows, promoted by compare-and-set; one batch in five is refused."""
    store, night = mine.ledger.store, mine.night
    assert night.batch is not None
    new = rows_of(store, night.batch)
    for _ in new:
        time.sleep(_STEP_SECONDS)
        if RAISED:
            raise RAISED.pop()
    with store.workspace.scratch() as scratch:
        (scratch / "rows").write_text("\n".join([*policy(store, night.production), *new]))
        inputs = {"data": night.batch} | ({"model": night.production} if night.production else {})
        key = journal_key(night.production, night.batch)
        candidate = store.publish(scratch, "model", draft(key, stage="dpo", label="dpo", inputs=inputs))
    state = "refused" if int(night.batch.digest[:8], 16) % 5 == 0 else promote(store, candidate, night.production)
    time.sleep(_STEP_SECONDS)
    mine.end(night.model_copy(update={"state": state, "candidate": candidate}))


def promote(store: Store, candidate: Reference, expected: Reference | None) -> str:
    """As `alignment.tasks.promotion.promote` moves the tag."""
    try:
        store.tags.move(PRODUCTION, candidate, expected, reason="gates passed")
    except Conflict:
        moves = store.tags.history(PRODUCTION)
        return "promoted" if any((m.to, m.previous) == (candidate, expected) for m in moves) else "conflict"
    return "promoted"


def journal_key(*of: Reference | None) -> str:
    return uuid.uuid5(uuid.NAMESPACE_OID, " ".join(map(str, of))).hex * 2


def rows_of(store: Store, batch: Reference | None) -> list[str]:
    assert batch is not None
    return [json.loads(line)["prompt"] for line in (store.fetch(batch) / ROWS).read_text().splitlines()]


def policy(store: Store, model: Reference | None) -> list[str]:
    """The rows that a policy was trained on."""
    return (store.fetch(model) / "rows").read_text().split("\n") if model else []


RAISED: list[Exception] = []


def raise_in_training(error: Exception) -> None:
    RAISED.append(error)


def later(seconds: float, does: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, does)
    timer.daemon = True
    timer.start()


def break_folder() -> None:
    """From now on the folder answers as a file server does that is away."""

    def away(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    FolderBackend._temporary = away  # type: ignore[method-assign]
    Path.read_bytes = away  # type: ignore[method-assign]
