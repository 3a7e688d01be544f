"""Writers in several processes move one tag against each other: each move has one winner, and the history has no gap."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import Conflict
from tests.campaigns.places import Outcome, Place, outcome
from tests.processes import ended, in_child

COUNT, STORES = 200, ("folder", "s3")
WRITERS, _PROCESSES = 32, 4


def run(place: Place, count: int, seed: int) -> Outcome:
    """``count`` moves, each of which all writers may try to make."""
    backend = place.backend()
    store = place.store(backend)
    models = [store.publish(place.write({"n": b"%d" % n}), "model") for n in range(WRITERS)]
    report = place.folder / "report"
    report.mkdir()
    share = WRITERS // _PROCESSES

    def process(number: int) -> None:
        mine = place.store(pickle.loads(pickle.dumps(backend)))
        ours = range(number * share, (number + 1) * share)
        threads = [threading.Thread(target=_write, args=(mine, models[n], count, report / str(n))) for n in ours]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = [in_child(partial(process, number)) for number in range(_PROCESSES)]
    assert [ended(child) for child in children] == [0] * _PROCESSES, "a writer failed"
    history = store.tags.history(
        "policy"
    )  # with an additional move, if a tag returned to an artifact that a writer had seen
    assert [move.number for move in history] == list(range(1, len(history) + 1)), "the history has a gap"
    assert len(history) >= count
    winners: dict[int, list[str]] = {move.number: [] for move in history}
    attempts = [(file.name, *line.split()) for file in report.iterdir() for line in file.read_text().splitlines()]
    for writer, number, how in attempts:
        if how == "won":
            winners[int(number)].append(writer)
    previous = [None, *(move.to for move in history[:-1])]
    bad = sum(
        [str(models.index(move.to))] != winners[move.number] or move.previous != before
        for move, before in zip(history, previous, strict=True)
    )
    return outcome("tags", place, count, seed, bad, "moves without one winner", writers=WRITERS, attempts=len(attempts))


def _write(store: Store, mine: Reference, count: int, report: Path) -> None:
    """Try to make each move, and note which of the tries won."""
    with report.open("a") as file:
        while True:
            latest = store.tags.last("policy")
            number = latest.number + 1 if latest else 1
            if number > count:
                return
            try:
                won = store.tags.move("policy", mine, latest.to if latest else None, f"move {number}").number
                file.write(f"{won} won\n")
            except Conflict:
                file.write(f"{number} lost\n")
