"""The index: its answers equal the store's, even if its file is damaged or others write into it or the store."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, Summary, collect, index, open_store
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.index_file import VERSION
from alignment_core.artifacts.manifest import manifest_at
from alignment_core.artifacts.paths import (
    MANIFESTS,
    PRUNED,
    STAGES,
    manifest_path,
    stage_path,
)
from alignment_core.artifacts.provenance import parse_record
from alignment_core.canonical import digest_of
from alignment_core.errors import Corrupt
from alignment_core.lineage import Graph
from tests.artifacts.conftest import age

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_store(f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def answers_of_index(store: Store) -> Any:
    """The answers of the index."""
    manifests, moves = list(store.artifacts()), {name: store.tags.history(name) for name in store.tags.all()}
    answers = (list(store.records.all()), manifests, store.summaries(), store.tags.all(), moves)
    references = {manifest.reference for manifest in manifests}
    with Graph.of(store) as graph:
        return (*answers, {reference: _around(graph, reference) for reference in references})


def read(store: Store) -> Any:
    """The same, read from the store's objects without it."""
    backend = store.backend
    records = [parse_record(store.uri, entry.path, backend.read(entry.path)) for entry in backend.list(STAGES)]
    manifests = [manifest_at(store.backend, Path(entry.path).stem) for entry in backend.list(MANIFESTS)]
    marks = {Path(entry.path).name for entry in backend.list(PRUNED)}
    names = {move.name: move.to for move in store.tags.moves()}
    references = {manifest.reference for manifest in manifests}
    graph = Graph(records)
    return (
        records,
        manifests,
        [Summary.of(manifest, graph.made_by(manifest.reference), manifest.digest in marks) for manifest in manifests],
        names,
        {name: [move for move in store.tags.moves() if move.name == name] for name in names},
        {reference: _around(graph, reference) for reference in references},
    )


def _around(graph: Graph, reference: Reference) -> tuple[object, ...]:
    around = (graph.made_by(reference), graph.used_by(reference))
    return (*around, set(graph.behind(reference)), set(graph.made_from(reference)))


def test_the_history_of_an_artifact_is_in_short_what_its_records_say(
    store: Store, make: Callable[..., Reference]
) -> None:
    data = make(store, "data", kind="dataset")
    first = make(store, "first", data)
    second = make(store, "second", first, data)
    make(store, "other", data)
    with store.index.view(STAGES) as view:
        history = view.history(second)
        records = {record.key: record for record in view.records()}
    assert {brief.label for brief in history} == {"data", "first", "second"}
    for brief in history:
        made = records[brief.key]
        assert (brief.stage, brief.inputs, brief.outputs) == (made.stage, made.inputs, made.outputs)
        assert (brief.started_at, brief.finished_at, brief.seconds) == (made.started_at, made.finished_at, made.seconds)


def replace(store: Store, path: str, data: bytes) -> None:
    entry = store.backend.stat(path)
    assert entry is not None
    assert store.backend.put(path, data, replaces=entry.version)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """The paths that are read from the store."""
    paths, real = list[str](), type(store.backend).read

    def noted(backend: Any, path: str) -> bytes:
        paths.append(path)
        return real(backend, path)

    monkeypatch.setattr(type(store.backend), "read", noted)
    return paths


def test_indexed_documents_are_not_read_again(store: Store, make: Callable[..., Reference], reads: list[str]) -> None:
    data = make(store, "data", kind="dataset")
    model = make(store, "model", data)
    store.tags.move("policy", model, None, "first")
    assert answers_of_index(store) == read(store)
    reads.clear()
    with Graph.of(open_store(store.uri, writes=False)) as graph:
        assert [used for _, used in graph.parents(model)] == [data]
    assert (len(store.summaries()), store.tags.all()["policy"]) == (2, model)
    assert set(reads) <= {"format.json"}
    make(store, "other", model)
    reads.clear()
    assert len(store.summaries()) == 3
    assert len(reads) == 2, "the new manifest and the new record"


def test_a_replaced_record_is_read_again_and_a_deleted_record_disappears(
    store: Store, make: Callable[..., Reference]
) -> None:
    model = make(store, "model")
    (record,) = store.records.all()
    changed = record.model_copy(update={"label": "another"})
    replace(store, stage_path(record.key), changed.model_dump_json().encode())
    assert list(store.records.all()) == [changed]
    assert store.summaries()[0].made_by == ("another",)
    store.backend.delete(stage_path(record.key))
    assert store.records.makers(model) == []
    assert answers_of_index(store) == read(store)


def test_unreadable_documents_are_logged_and_left_out_until_repaired(
    store: Store, make: Callable[..., Reference], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(store, "one"), make(store, "two")
    path, whole = manifest_path(first.digest), store.backend.read(manifest_path(first.digest))
    replace(store, path, b"{}")
    replace(store, stage_path(digest_of("one")), b"broken")
    for _ in range(2):
        caplog.clear()
        assert [manifest.reference for manifest in store.artifacts()] == [second]
        assert [record.label for record in store.records.all()] == ["two"]
        assert len(caplog.records) == 2
    replace(store, path, whole)
    assert len(list(store.artifacts())) == 2
    store.tags.move("policy", second, None, "first")
    replace(store, "tags/policy/00000001.json", b"{}")
    with pytest.raises(Corrupt, match="is not a tag move"):
        store.tags.all()


def test_records_are_found_by_stage_and_by_key(store: Store, write: Callable[..., Path]) -> None:
    for name in ("sft", "dpo"):
        parts = {"key": digest_of(name), "stage": name, "label": name, "key_parts": {"stage": name}}
        store.publish(write(name, {"file": name}), "model", ProvenanceDraft.model_validate(parts))
    assert [record.stage for record in store.records.all("dpo")] == ["dpo"]
    assert len(list(store.records.all("dpo", "sft", "other"))) == 2
    assert {key: record.stage for key, record in store.records.by_key([digest_of("sft"), "0" * 64]).items()} == {
        digest_of("sft"): "sft"
    }


# ------------------------------------------------------------------ the file


def damaged(path: Path, how: str) -> None:
    """Let something happen to the file of an index."""
    data = bytearray(path.read_bytes())
    if how == "deleted":
        shutil.rmtree(path.parent)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(os.urandom(len(data)))
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "holes":
        for start in range(4096, len(data), 8192):
            data[start : start + 4096] = os.urandom(4096)
        path.write_bytes(data)
    elif how == "a changed letter":
        at = data.index(b'"label": "model"')
        data[at + 10 : at + 15] = b"MODEL"
        path.write_bytes(data)
    elif how == "other version":
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    elif how == "other tables":
        path.unlink()
        with sqlite3.connect(path) as db:
            db.executescript(f"CREATE TABLE objects (x); PRAGMA user_version = {VERSION};")
        db.close()


DAMAGES = ("deleted", "empty", "garbage", "cut", "holes", "a changed letter", "other version", "other tables")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_file_loses_nothing(
    folder: Store, make: Callable[..., Reference], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(folder, "model")
    for name in "abcdefgh":
        model = make(folder, name, model)
    folder.tags.move("policy", model, None, "first")
    expected = answers_of_index(folder)
    damaged(folder.index.path, how)
    assert answers_of_index(folder) == expected == read(folder)
    assert answers_of_index(folder) == expected
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    with sqlite3.connect(folder.index.path) as db:  # it was rebuilt
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
    db.close()


def test_an_index_file_damaged_while_open_is_replaced(folder: Store, make: Callable[..., Reference]) -> None:
    first = make(folder, "model")
    second = make(folder, "other", first)
    answers_of_index(folder)
    with Graph.of(folder) as graph:
        damaged(folder.index.path, "garbage")
        assert [used for _, used in graph.parents(second)] == [first]
        assert answers_of_index(folder) == read(folder)


@pytest.mark.parametrize("where", ["a file", "not a folder", "small disk"])
def test_a_home_that_takes_no_index_costs_one_line(
    where: str,
    folder: Store,
    make: Callable[..., Reference],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in "abc":
        make(folder, name)
    home = request.getfixturevalue("small_disk") if where == "small disk" else tmp_path / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("ALIGN_HOME", str(home))
    if where == "a file":
        (home / "indexes").write_text("")
    elif where == "not a folder":
        folder.index.path.mkdir(parents=True)
    else:
        (home / "filler").write_bytes(bytes((1 << 20) - (16 << 10)))
    assert answers_of_index(folder) == read(folder)
    assert answers_of_index(folder) == read(folder)
    assert len([record for record in caplog.records if record.levelno > logging.INFO]) == 1


def test_another_users_file_is_not_believed(
    folder: Store, make: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, "model")
    answers_of_index(folder)
    with sqlite3.connect(folder.index.path) as db:
        db.execute("""UPDATE facts SET note = '["", "", "", ["a lie"]]' WHERE fact = 'output'""")
    db.close()
    assert folder.summaries()[0].made_by == ("a lie",)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert folder.summaries()[0].made_by == ("model",)


# ------------------------------------------------------------------ several processes


def test_processes_that_fill_the_index_concurrently_all_see_the_store(
    store: Store, make: Callable[..., Reference], in_children: Callable[..., list[int]]
) -> None:
    for number in range(6):
        make(store, f"model-{number}")
    uri = store.uri

    def looks() -> None:
        mine = open_store(uri, writes=False)
        for _ in range(3):
            assert {record.label for record in mine.records.all()} >= {f"model-{number}" for number in range(6)}

    def works(name: str) -> Callable[[], None]:
        def work() -> None:
            mine = open_store(uri)
            for number in range(3):
                reference = make(mine, f"{name}-{number}")
                assert [record.label for record in mine.records.makers(reference)] == [f"{name}-{number}"]

        return work

    assert in_children(looks, works("a"), looks, works("b")) == [0] * 4
    assert answers_of_index(store) == read(store)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_process_killed_while_filling_the_index_does_no_harm(
    step: int,
    folder: Store,
    make: Callable[..., Reference],
    monkeypatch: pytest.MonkeyPatch,
    in_children: Callable[..., list[int]],
) -> None:
    for number in range(4):
        make(folder, f"model-{number}")
    monkeypatch.setattr(index, "_READ_AT_ONCE", 2)
    real, begun = FolderBackend.read, list[str]()
    guard = threading.Lock()

    def dies() -> None:
        def counted(backend: FolderBackend, path: str) -> bytes:
            with guard:
                begun.append(path)
                if len(begun) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(backend, path)

        FolderBackend.read = counted  # type: ignore[method-assign, assignment]
        folder.summaries()

    assert in_children(dies) == [-signal.SIGKILL]
    assert answers_of_index(folder) == read(folder)


def test_a_view_is_a_snapshot_despite_later_writes_to_the_index(folder: Store, make: Callable[..., Reference]) -> None:
    first = make(folder, "first")
    old = folder.index.view(STAGES)
    second = make(folder, "second", first)
    assert len(list(folder.records.all())) == 2
    assert [record.label for record in old.records()] == ["first"]
    assert old.users(first) == []
    late = folder.index.view_of({STAGES: {}})  # another process, whose listing is older, takes all of it out again
    assert list(late.records()) == []
    assert [record.label for record in folder.records.makers(second)] == ["second"]


# ------------------------------------------------------------------ against a model


def test_any_sequence_of_changes_is_answered_as_the_plain_reading_is(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    numbers = iter(range(10**6))
    names = st.sampled_from("abcdef")

    class Changes(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.store = open_store(tmp_path / f"store-{next(numbers)}")

        def folder(self, name: str) -> Path:
            return write(name, {"file": name})

        @rule(
            name=names, used=st.lists(names, max_size=2), kind=st.sampled_from(["model", "rollouts"]), two=st.booleans()
        )
        def publish(self, name: str, used: list[str], kind: str, two: bool) -> None:
            known = [manifest.reference for manifest in self.store.artifacts()]
            inputs = {f"{place}": known[ord(letter) % len(known)] for place, letter in enumerate(used) if known}
            key = digest_of([name, kind, two])
            draft = {"key": key, "stage": kind, "label": name, "inputs": inputs, "key_parts": {"stage": kind}}
            outputs = {"out": (self.folder(name), kind)} | ({"more": (self.folder(f"{name}2"), kind)} if two else {})
            self.store.publish_outputs(outputs, ProvenanceDraft.model_validate(draft))

        @rule(name=names)
        def publish_without_record(self, name: str) -> None:
            self.store.publish(self.folder(name), "dataset")

        @rule(tag=st.sampled_from(["x", "x/y", "z"]), pick=st.integers(0, 99))
        def move(self, tag: str, pick: int) -> None:
            known = [manifest.reference for manifest in self.store.artifacts()]
            if known:
                self.store.tags.move(tag, known[pick % len(known)], self.store.tags.get(tag), "moved")

        @rule(pick=st.integers(0, 99))
        def forget(self, pick: int) -> None:
            paths = [entry.path for entry in self.store.backend.list(STAGES)]
            if paths:
                self.store.backend.delete(paths[pick % len(paths)])

        @rule()
        def gather(self) -> None:
            age(self.store, 1)
            collect(self.store, delete=True)

        @rule(how=st.sampled_from(DAMAGES[:5]))
        def damage(self, how: str) -> None:
            if self.store.index.path.exists():
                damaged(self.store.index.path, how)

        @rule()
        def compare(self) -> None:
            assert answers_of_index(self.store) == read(self.store)

        def teardown(self) -> None:
            self.compare()

    changes = Changes.TestCase
    changes.settings = settings(max_examples=8, stateful_step_count=15)
    changes("runTest").runTest()
