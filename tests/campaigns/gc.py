"""Publishers, collectors and readers of one store, of which one at a time makes a step: a seed decides the turns, the
deaths, and the store's clock. A step is a call to the storage.

Nothing reachable from a record or a tag may be deleted, and in the end nothing else may stay. The store and its
collector are real; the clock and the liveness of processes are the schedule's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from alignment_core.artifacts import Backend, Store, collect
from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.paths import STAGES, blob_path, manifest_path, stage_path
from alignment_core.errors import NotFound
from alignment_core.processes import ProcessId
from tests.campaigns.places import Outcome, Place, draft, outcome

COUNT, STORES = 100_000, ("folder", "s3")
GRACE = 300.0
_OF_ONE_STORE = 5_000
_DEATH = 0.004  # at a step
_TICK = 8.0  # seconds of the store's clock that a step takes, on average
_WORKS = ("publishes", "publishes", "collects", "collects", "reads", "forgets", "forgets")


def run(place: Place, count: int, seed: int) -> Outcome:
    steps, lost, left, deaths, collected = 0, 0, 0, 0, 0
    while steps < count:
        schedule = Schedule(random.Random(seed + steps), min(_OF_ONE_STORE, count - steps))
        with _ruled_by(schedule):
            world = World(place, schedule)
            world.go_on()
            lost += len(world.lost)
            left += len(world.left_at_the_end())
        steps, deaths, collected = steps + schedule.taken, deaths + schedule.deaths, collected + world.collected
    return outcome(
        "gc", place, steps, seed, lost + left, "reachable lost or garbage left", deaths=deaths, collected=collected
    )


class Died(BaseException):
    """The end of an actor; no handler of errors holds it up."""


class Schedule:
    """Whose turn it is. Threads that are not waiting for theirs hold everybody up, so that a seed is one history."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng, self.steps, self.taken, self.deaths, self.now = rng, steps, 0, 0, 1e9
        self.dead: set[str] = set()
        self.errors: list[Exception] = []
        self._turn = threading.Condition()
        self._waiting: list[str] = []
        self._next: str | None = None
        self._actors = 0
        self.mine = threading.local()

    @property
    def me(self) -> str:
        return getattr(self.mine, "name", "main")

    def run(self, works: dict[str, Callable[[], None]]) -> None:
        """Run each function in its own thread, until all have ended."""
        self._actors = len(works)

        def act(name: str, work: Callable[[], None]) -> None:
            self.mine.name = name
            try:
                work()
            except Died:
                pass
            except Exception as error:
                self.errors.append(error)
            finally:
                with self._turn:
                    self._actors -= 1
                    self._choose()

        threads = [threading.Thread(target=act, args=work) for work in works.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def step(self) -> None:
        """Wait for the turn of this actor, which may be its last."""
        if self.me == "main":
            return
        if self.me in self.dead:
            raise Died
        with self._turn:
            self._waiting.append(self.me)
            self._choose()
            while self._next != self.me:
                self._turn.wait()
            self._next = None
            self.taken += 1
            self.now += self.rng.expovariate(1 / _TICK)
            if self.rng.random() < _DEATH:
                self.deaths += 1
                self.dead.add(self.me)
        if self.me in self.dead:
            raise Died

    def _choose(self) -> None:
        if self._waiting and len(self._waiting) == self._actors and self._next is None:
            self._next = self.rng.choice(sorted(self._waiting))
            self._waiting.remove(self._next)
            self._turn.notify_all()


class Stepped:
    """A back end each call of which is a step of the schedule, with the schedule's clock."""

    def __init__(self, backend: Backend, schedule: Schedule, times: dict[str, float]) -> None:
        self._backend, self._schedule, self._times = backend, schedule, times

    @property
    def uri(self) -> str:
        return self._backend.uri

    @property
    def endpoint(self) -> str:
        return self._backend.endpoint

    @property
    def few_writes(self) -> bool:
        return self._backend.few_writes

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        self._schedule.step()
        version = self._backend.put(path, source, replaces)
        if version is not None:
            self._times[path] = self._schedule.now
        return version

    def read(self, path: str) -> bytes:
        self._schedule.step()
        return self._backend.read(path)

    def stream(self, path: str) -> Iterator[bytes]:
        self._schedule.step()
        return self._backend.stream(path)

    def download(self, path: str, destination: Path) -> None:
        self._schedule.step()
        self._backend.download(path, destination)

    def stat(self, path: str) -> Object | None:
        self._schedule.step()
        entry = self._backend.stat(path)
        return entry and self._dated(entry)

    def list(self, prefix: str) -> Iterator[Object]:
        self._schedule.step()
        yield from [self._dated(entry) for entry in self._backend.list(prefix)]

    def delete(self, path: str, version: str | None = None) -> None:
        self._schedule.step()
        self._backend.delete(path, version)

    def now(self) -> float:
        self._schedule.step()
        return self._schedule.now

    def unfinished(self) -> Iterator[Object]:
        yield from ()

    def drop(self, upload: Object) -> None:
        raise AssertionError("nothing here is large")

    def _dated(self, entry: Object) -> Object:
        return Object(entry.path, entry.size, self._times.get(entry.path, 0.0), entry.version)


class World:
    """The store, and the expected state from outside."""

    def __init__(self, place: Place, schedule: Schedule) -> None:
        self.place, self.schedule, self.rng = place, schedule, schedule.rng
        self.backend = Stepped(place.backend(), schedule, {})
        self.directories = [
            place.write({"shared": b"by all", "some": b"%d" % (n % 3), "own": b"%d" % n}) for n in range(7)
        ]
        self.lost: list[str] = []
        self.collected = 0
        self.generation = 0

    def go_on(self) -> None:
        """Actors with a single life; a dead or finished actor is replaced by another."""
        while self.schedule.taken < self.schedule.steps:
            self.generation += 1
            names = [f"{self.generation}-{number}" for number in range(5)]
            works = [getattr(self, self.rng.choice(_WORKS)) for _ in names]
            self.schedule.run(dict(zip(names, works, strict=True)))
            self._check()

    def store(self) -> Store:
        return self.place.store(self.backend)

    def publishes(self) -> None:
        store = self.store()
        number = self.rng.randrange(len(self.directories))
        if self.rng.random() < 0.3:
            reference = store.publish(self.directories[number], "model")
            began, problems = self.schedule.now, store.verify(reference)
            if problems and self.schedule.now - began < GRACE:
                self.lost.append(f"just published without a record, and {problems}")
        else:
            store.publish(self.directories[number], "model", draft(f"{number:064x}"))

    def collects(self) -> None:
        with suppress(NotFound):  # a record that was deleted after the listing
            self.collected += len(collect(self.store(), delete=True, older_than=GRACE).garbage)

    def reads(self) -> None:
        """Objects that a record refers to before and after the check existed all the time."""
        store = self.store()
        for entry in self.backend.list(STAGES):
            with suppress(NotFound):
                record = store.records.read(entry.path)
                problems = store.verify(record.output)
                after = self.backend.stat(entry.path)
                if problems and after is not None and after.version == entry.version:
                    self.lost.append(f"a record refers to it, and {problems}")

    def forgets(self) -> None:
        """Deletes records, and so the references to their artifacts."""
        for number in self.rng.sample(range(len(self.directories)), 3):
            self.backend.delete(stage_path(f"{number:064x}"))

    def _check(self) -> None:
        """While all actors wait: everything reachable is whole."""
        store = self.store()
        for record in store.records.all():
            for reference in record.outputs.values():
                if problems := store.verify(reference):
                    self.lost.append(f"reachable, and {problems}")
        self.schedule.dead |= {f"{self.generation}-{number}" for number in range(5)}

    def left_at_the_end(self) -> list[str]:
        """Objects that should be gone after the grace period and a collection."""
        store = self.store()
        self.schedule.now += 10 * GRACE
        collect(store, delete=True, older_than=GRACE)
        roots = {reference for record in store.records.all() for reference in record.outputs.values()}
        blobs = {blob_path(entry.sha256) for reference in roots for entry in store.manifest(reference).files}
        stored = {entry.path for prefix in ("blobs/", "manifests/", "leases/") for entry in self.backend.list(prefix)}
        expected = blobs | {manifest_path(root.digest) for root in roots}
        return sorted(stored ^ expected)


class _InTurn:
    """A pool that works in the calling thread, as part of its actor's steps."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> _InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        return iter([work(item) for item in items])


def _ruled_by(schedule: Schedule) -> ExitStack:
    """Put the schedule in the place of threads, processes and sleep."""
    stack = ExitStack()
    modules = "alignment_core.artifacts"
    for module in ("store", "records", "cache", "blobs", "index"):
        stack.enter_context(patch(f"{modules}.{module}.ThreadPoolExecutor", _InTurn))
    stack.enter_context(patch(f"{modules}.leases._pauses", lambda: iter(lambda: 0.0, None)))
    stack.enter_context(patch.object(ProcessId, "mine", lambda: ProcessId(pid=1, started=1, boot=schedule.me)))
    stack.enter_context(patch.object(ProcessId, "lives", lambda process: process.boot not in schedule.dead))
    return stack
