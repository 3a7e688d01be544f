"""The index as it was a moment ago: what readers see, when it is replaced, and where it lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.errors import EnvironmentFault


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def snapshot(store: Store) -> Iterator[IndexSnapshot]:
    made = IndexSnapshot(store, seconds=0.0)
    yield made
    made.release()


def labels(snapshot: IndexSnapshot) -> set[str]:
    with snapshot.reading() as view:
        return {record.label for record in view.records()}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_gets_the_listing_that_there_is_and_a_new_one_comes_in_the_background(
    store: Store, snapshot: IndexSnapshot, make: Callable[..., Reference]
) -> None:
    make(store, "first")
    assert labels(snapshot) == {"first"}
    second = make(store, "second")
    store.tags.move("policy", second, None, "")
    eventually(lambda: labels(snapshot) == {"first", "second"})
    eventually(lambda: snapshot.tags == {"policy": second})
    assert [move.name for move in snapshot.moves[second]] == ["policy"]


def test_a_young_snapshot_is_not_replaced(store: Store, make: Callable[..., Reference]) -> None:
    snapshot = IndexSnapshot(store, seconds=3600)
    make(store, "first")
    assert labels(snapshot) == {"first"}
    make(store, "second")
    assert labels(snapshot) == {"first"}
    snapshot.refresh()
    assert labels(snapshot) == {"first", "second"}
    snapshot.release()
    assert labels(snapshot) == {"first", "second"}
    snapshot.release()


def test_it_lives_in_memory_where_no_file_can_be_written(
    store: Store, make: Callable[..., Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(store, "data")
    model = make(store, "model", data)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "file"))
    snapshot = IndexSnapshot(open_store(store.uri, writes=False))
    with snapshot.reading() as view:
        assert view.ancestors(model) == {data}
        assert {brief.label for brief in view.history(model)} == {"data", "model"}
    snapshot.release()


def test_a_store_that_cannot_be_listed_any_more_is_shown_as_it_was(
    store: Store, snapshot: IndexSnapshot, make: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, "first")
    assert labels(snapshot) == {"first"}

    def fails(*_: object) -> None:
        raise EnvironmentFault("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr(type(store.index), "view", fails)
        eventually(lambda: labels(snapshot) == {"first"} and snapshot.problem == "the server is away")
        with pytest.raises(EnvironmentFault):
            IndexSnapshot(store).refresh()
    make(store, "second")
    eventually(lambda: labels(snapshot) == {"first", "second"})
    assert snapshot.problem == ""


def test_readers_of_many_threads_see_whole_listings(
    store: Store, snapshot: IndexSnapshot, make: Callable[..., Reference]
) -> None:
    first = make(store, "0")
    seen: list[bool] = []

    def look() -> None:
        for _ in range(40):
            with snapshot.reading() as view:
                seen.append(
                    {record.label for record in view.records()} == {*map(str, range(len(list(view.records()))))}
                )

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 20):
        first = make(store, str(number), first)
    for thread in threads:
        thread.join()
    assert len(seen) == 160
    assert all(seen)
