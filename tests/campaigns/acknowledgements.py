"""The server is killed (SIGKILL) and started again, and answers are lost on their way, while writers put objects and move
tags: acknowledged writes are there in the end, and refused writes had no effect."""

from __future__ import annotations

import random
import signal
import sys
import threading
import uuid
from dataclasses import dataclass, field
from unittest.mock import patch

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.paths import tag_path
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.errors import Conflict, InfrastructureError
from tests.campaigns.places import Outcome, Place, outcome
from tests.servers.faulty import Fault, Faulty

COUNT, STORES = 500, ("s3",)
_WRITERS = 6
_KILL = 0.1  # of the faults; the others are lost answers
_EVERY = 12  # requests, about


@dataclass
class Report:
    """The answers that a writer got."""

    objects: dict[str, bytes] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    """The number of each acknowledged move, by its reason."""
    refused: set[str] = field(default_factory=set)
    """Moves that were answered by a Conflict."""
    unknown: int = 0


def run(place: Place, count: int, seed: int) -> Outcome:
    assert place.server is not None
    backend = place.backend()
    assert isinstance(backend, S3Backend)
    with (
        patch("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: random.uniform(0.05, 0.5)),
        patch(
            "botocore.retries.quota.RetryQuota.acquire", lambda *_: True
        ),  # the faults here are denser than any quota
        Faulty(place.server.url) as proxy,
        patch.dict("os.environ", {"AWS_ENDPOINT_URL": proxy.url}),
    ):
        troubles = Troubles(place, random.Random(seed), count)
        models = [place.store(backend).publish(place.write({"n": b"%d" % n}), "model") for n in range(_WRITERS)]
        proxy.rule = troubles.rule
        reports = [Report() for _ in range(_WRITERS)]
        threads = [
            threading.Thread(
                target=_write, args=(place.store(S3Backend("bucket", backend.prefix)), models, number, report, troubles)
            )
            for number, report in enumerate(reports)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not troubles.failed, troubles.failed
    place.server.end(signal.SIGKILL)
    place.server.start()
    reader = S3Backend("bucket", backend.prefix)
    lost = sorted({wrong for report in reports for wrong in _lost(place.store(reader), report)})
    there = [path for report in reports for path in _refused_and_there(place.store(reader), report)]
    wrong = [
        path
        for path in there
        if "writer" in reader.requests.client.head_object(Bucket="bucket", Key=reader.prefix + path)["Metadata"]
    ]
    print(*lost, *wrong, sep="\n", end="\n" if lost or wrong else "", file=sys.stderr)
    return outcome(
        "acknowledgements",
        place,
        count,
        seed,
        len(lost) + len(wrong),
        "acknowledged writes lost, or one's own refused",
        kills=troubles.kills,
        acknowledged=sum(len(report.objects) + len(report.moves) for report in reports),
        unknown=sum(report.unknown for report in reports),
        written_without_metadata_by_the_killed_server=len(there) - len(wrong),
    )


class Troubles:
    """The rule of the proxy: now and then an answer is lost, or the server killed, before the request or after it."""

    def __init__(self, place: Place, rng: random.Random, count: int) -> None:
        self.server, self.rng, self.left, self.kills = place.server, rng, count, 0
        self.failed: list[BaseException] = []

    def rule(self, method: str, target: str, number: int) -> Fault | None:
        if self.left <= 0 or self.rng.random() > 1 / _EVERY:
            return None
        self.left -= 1
        if self.rng.random() < _KILL:
            assert self.server is not None
            self.kills += 1
            self.server.end(signal.SIGKILL)  # amid other requests
            self.server.start()
        return Fault(lost=True)


def _write(store: Store, models: list[Reference], number: int, report: Report, troubles: Troubles) -> None:
    rng = random.Random(number)
    try:
        while troubles.left > 0 and not troubles.failed:
            name = f"results/{uuid.uuid4().hex}"
            try:
                if rng.random() < 0.5:
                    if store.backend.put(name, name.encode()) is None:
                        report.refused.add(name)  # a unique path
                    else:
                        report.objects[name] = name.encode()
                else:
                    latest = store.tags.last("policy")
                    to = latest.to if latest else None
                    report.moves[name] = store.tags.move("policy", models[number], to, name).number
            except Conflict:
                report.refused.add(name)
            except InfrastructureError:
                report.unknown += 1
    except BaseException as error:
        troubles.failed.append(error)


def _lost(store: Store, report: Report) -> list[str]:
    """Acknowledged writes that are not there."""
    history = {move.reason: move.number for move in store.tags.history("policy")}
    bad = [
        f"move {number} is {history.get(reason)}"
        for reason, number in report.moves.items()
        if history.get(reason) != number
    ]
    if sorted(history.values()) != list(range(1, len(history) + 1)):
        bad.append("the history has a gap")
    for path, data in report.objects.items():
        if store.backend.stat(path) is None or store.backend.read(path) != data:
            bad.append(f"{path} is not there")
    return bad


def _refused_and_there(store: Store, report: Report) -> list[str]:
    """Paths of refused writes that took effect. This server puts an object's bytes in place and then
    its metadata, so that a kill between the two makes an object without the mark of its writer, which S3 itself never does;
    such an object cannot be attributed."""
    moves = {move.reason: tag_path("policy", move.number) for move in store.tags.history("policy")}
    return [moves.get(path, path) for path in report.refused if path in moves or store.backend.stat(path) is not None]
