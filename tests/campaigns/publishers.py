"""Publishers are killed (SIGKILL) at a random call to the storage, also during a multipart upload; readers must see only
whole artifacts after each death."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

from botocore.client import BaseClient

from alignment_core.artifacts import Backend, Reference, Store, collect
from alignment_core.artifacts.manifest import manifest_at
from alignment_core.artifacts.paths import MANIFESTS
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.artifacts.s3_client import new_client
from alignment_core.artifacts.s3_requests import _IN_MEMORY, Connection
from alignment_core.errors import AlignmentError
from tests.campaigns.places import Outcome, Place, draft, outcome
from tests.processes import ended, in_child, kill_at

COUNT, STORES = 1000, ("folder", "s3")
_PART = 64 << 10  # so that small files travel in parts
_LAST_CALL = {"folder": 70, "s3": 40}  # of a publication, about
_OF_ONE_STORE = 25
"""Kills after which the next store begins; until then publishers continue from the state that killed ones left."""


def run(place: Place, count: int, seed: int) -> Outcome:
    rng, kills, partial, wrong_at_the_end = random.Random(seed), 0, 0, 0
    client = new_client() if place.kind == "s3" else None
    with patch("alignment_core.artifacts.downloads.PART", _PART):
        while kills < count:
            backend = place.backend()
            directories = [place.write(_files(rng)) for _ in range(3)]
            enough = min(count, kills + _OF_ONE_STORE)
            while kills < enough:
                number, step, after = rng.randrange(3), rng.randint(1, _LAST_CALL[place.kind]), rng.random() < 0.5

                def publish(number=number, step=step, after=after, backend=backend, directories=directories) -> None:
                    store = place.store(_own(backend, client))
                    _die_at(step, after)
                    store.publish(directories[number], "model", draft(f"{number:064x}"))

                code = ended(in_child(publish))
                assert code in (0, -signal.SIGKILL), "a publisher failed"
                kills += code != 0
                partial += _partial(place.store(backend))
            wrong_at_the_end += _unlike_never_killed(place.store(backend), directories)
    return outcome("publishers", place, kills, seed, partial + wrong_at_the_end, "partial artifacts visible")


def _files(rng: random.Random) -> dict[str, bytes]:
    sizes = {"config.json": 20, "tokenizer/words": 500, "weights": 3 * _PART + 7}
    return {name: rng.randbytes(size) for name, size in sizes.items()} | {"shared": b"in each of them"}


def _own(backend: Backend, client: BaseClient | None) -> Backend:
    """The back end as a child has it. To make a client takes longer than to publish, so that the child takes one that its
    parent has made and never used."""
    if isinstance(backend, S3Backend):
        backend = S3Backend(backend.bucket, backend.prefix)
        backend.requests._connection = Connection(os.getpid(), client, threading.BoundedSemaphore(_IN_MEMORY))
    return backend


def _die_at(step: int, after: bool) -> None:
    """Die at the so-manieth call that changes a folder or that a server gets, before it or after its answer has come."""
    kill_at(step, ("fsync", "link", "rename", "unlink"))
    call, guard, taken = BaseClient._make_api_call, threading.Lock(), 0

    def counted(self: BaseClient, name: str, request: dict[str, Any]) -> Any:
        nonlocal taken
        with guard:
            taken += 1
            mine = taken
        if mine == step and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = call(self, name, request)
        if mine == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    BaseClient._make_api_call = counted


def _partial(store: Store) -> int:
    """How many artifacts and finished stages a reader sees and cannot have."""
    wrong = 0
    for entry in store.backend.list(MANIFESTS):
        try:
            wrong += bool(store.verify(manifest_at(store.backend, Path(entry.path).stem).reference))
        except AlignmentError:
            wrong += 1
    for record in store.records.all():
        wrong += store.records.find(record.key) is None
    return wrong


def _unlike_never_killed(store: Store, directories: list[Any]) -> int:
    """The number of artifacts that cannot be published after the deaths, and garbage that the collector cannot delete."""
    references: list[Reference] = [
        store.publish(directory, "model", draft(f"{number:064x}")) for number, directory in enumerate(directories)
    ]
    collect(store, delete=True, older_than=-5)
    wrong = sum(
        bool(store.verify(reference)) or store.records.find(f"{n:064x}") is None
        for n, reference in enumerate(references)
    )
    return wrong + len(collect(store, older_than=-5).garbage) + len(list(store.backend.unfinished()))
