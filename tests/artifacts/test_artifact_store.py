"""The store without faults: publish, fetch, find, resolve, tags, progress, scratch, and refused input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from alignment_core.artifacts import FileEntry, FolderBackend, Manifest, Reference, check_backend, collect, open_store
from alignment_core.artifacts.paths import blob_path, manifest_path
from alignment_core.errors import Conflict, EnvironmentFault, NotFound, StoreError, UserError

KEY, OTHER_KEY = "a" * 64, "b" * 64


def test_published_files_are_fetched_read_only(store, write):
    directory = write("d", {"config.json": "{}", "weights/part-0.bin": b"\0\1", "empty": ""})
    path = store.fetch(store.publish(directory, "model"))
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert files == {"config.json": b"{}", "weights/part-0.bin": b"\0\1", "empty": b""}
    assert all(stat.S_IMODE(entry.stat().st_mode) & 0o222 == 0 for entry in [path, *path.rglob("*")])


def test_publishing_leaves_the_directory_alone(store, write):
    directory = write("d")
    store.publish(directory, "model")
    (directory / "config.json").write_text("changed")  # neither moved, linked nor read-only
    assert store.fetch(store.publish(write("e"), "model")).joinpath("config.json").read_text() == "{}"


def test_the_output_of_a_stage_becomes_the_stored_file_and_takes_no_space_twice(store, draft):
    with store.workspace.scratch() as scratch:
        (scratch / "weights").write_bytes(b"weights")
        (scratch / "weights").chmod(0o600)
        written = (scratch / "weights").stat()
        reference = store.publish(scratch, "model", draft())
        stored = store.backend.root / blob_path(hashlib.sha256(b"weights").hexdigest())
        assert stored.stat().st_ino == written.st_ino
    assert stat.S_IMODE(stored.stat().st_mode) == 0o444
    assert stored.stat().st_nlink == 1
    assert store.verify(reference) == []


def test_a_file_of_a_stage_that_has_another_name_is_copied(store, tmp_path):
    """As that of a checkpoint that is linked to the stage's output: it may still be written through the other name."""
    with store.workspace.scratch() as scratch:
        (scratch / "weights").write_bytes(b"weights")
        os.link(scratch / "weights", tmp_path / "checkpoint")
        reference = store.publish(scratch, "model")
    (tmp_path / "checkpoint").write_bytes(b"changed")
    assert store.verify(reference) == []


def test_the_same_bytes_twice_are_one_artifact(store, write, draft):
    first = store.publish(write("d"), "model", draft())
    assert store.publish(write("e"), "model", draft()) == first
    assert [manifest.reference for manifest in store.artifacts()] == [first]
    assert [record.output for record in store.records.all()] == [first]


def test_equal_files_are_stored_once(store, write):
    store.publish(write("d", {"a": "same", "b": "same"}), "model")
    assert len(list(store.backend.list("blobs/"))) == 1


def test_find_gives_the_whole_record_of_a_finished_stage(store, write, draft):
    assert store.records.find(KEY) is None
    data = store.publish(write("data", {"rows": "1"}), "dataset")
    sent = draft(inputs={"train": data}, config={"learning_rate": 1e-5}, metrics={"loss": float("inf"), "n": 3})
    output = store.publish(write("d"), "model", sent)
    record = store.records.find(KEY)
    assert record.output == output
    assert record.inputs == {"train": data}
    assert (record.config, record.metrics) == ({"learning_rate": 1e-5}, {"loss": "Infinity", "n": 3})
    assert store.records.makers(output) == [record]
    assert store.records.makers(data) == []
    json.loads(Path(store.uri, f"stages/{KEY}.json").read_text(), parse_constant=pytest.fail)  # strict JSON


def test_the_first_result_of_a_stage_key_stands(store, write, draft, caplog):
    first = store.publish(write("d"), "model", draft())
    with caplog.at_level(logging.WARNING):
        assert store.publish(write("e", {"other": "result"}), "model", draft()) == first
    assert "which is kept" in caplog.text
    assert store.records.find(KEY).output == first


def test_a_store_is_reopened_from_its_uri_and_survives_pickling(store, write):
    reference = store.publish(write("d"), "model")
    assert open_store(store.uri).manifest(reference) == store.manifest(reference)
    assert open_store(f"file://{store.uri}").manifest(reference) == store.manifest(reference)
    assert pickle.loads(pickle.dumps(store)).fetch(reference) == store.fetch(reference)


def test_the_default_store_lies_in_align_home(monkeypatch, tmp_path):
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    assert open_store(None).uri == str(tmp_path / "home" / "store")


def test_a_missing_artifact_is_reported_by_its_reference(store, write):
    absent = Reference("model", "0" * 64)
    with pytest.raises(NotFound, match="0" * 64):
        store.fetch(absent)
    assert "no artifact" in store.verify(absent)[0]
    model = store.publish(write("d"), "model")
    with pytest.raises(NotFound, match="is a model"):
        store.fetch(Reference("dataset", model.digest))


def test_resolve_takes_references_prefixes_and_tags(store, write):
    model = store.publish(write("d"), "model")
    store.tags.move("policy/production", model, None, "first")
    for text in (str(model), model.short, model.digest, model.digest[:6], "policy/production"):
        assert store.resolve(text) == model
    for text in (f"dataset@sha256:{model.digest[:6]}", "0000", "policy/staging", "abc", str(Reference("x", "0" * 64))):
        with pytest.raises(NotFound):
            store.resolve(text)
    with pytest.raises(NotFound, match="policy/production"):  # lists the existing tags
        store.resolve("policy/produktion")


def test_an_ambiguous_prefix_lists_the_candidates(store, write):
    seen: dict[str, str] = {}
    for text in map(str, range(5000)):  # 16**4 prefixes: by the birthday paradox two agree after a few hundred
        entry = FileEntry(path="n", size=len(text), sha256=hashlib.sha256(text.encode()).hexdigest())
        prefix = Manifest(kind="model", files=(entry,)).digest[:4]
        if prefix in seen:
            break
        seen[prefix] = text
    pair = [store.publish(write(n, {"n": n}), "model") for n in (seen[prefix], text)]
    with pytest.raises(UserError, match="ambiguous") as caught:
        store.resolve(prefix)
    assert all(str(reference) in str(caught.value) for reference in pair)


def test_tags_move_by_compare_and_set_with_history(store, write):
    first, second = store.publish(write("1", {"n": "1"}), "model"), store.publish(write("2", {"n": "2"}), "model")
    assert store.tags.get("policy") is None
    store.tags.move("policy", first, None, "first")
    store.tags.move("policy/production", first, None, "a nested name is another tag")
    move = store.tags.move("policy", second, first, "won 61 %")
    assert (move.number, move.previous, move.to, move.reason) == (2, first, second, "won 61 %")
    assert [entry.to for entry in store.tags.history("policy")] == [first, second]
    assert store.tags.all() == {"policy": second, "policy/production": first}
    with pytest.raises(Conflict, match="points to " + second.short):
        store.tags.move("policy", first, first, "stale")
    with pytest.raises(Conflict, match="the expected nothing"):
        store.tags.move("policy", first, None, "stale")
    with pytest.raises(NotFound):
        store.tags.move("policy", Reference("model", "0" * 64), second, "names nothing")


@pytest.mark.parametrize("name", ["", "../x", "/x", "x/", "a//b", "A", "a b", "a@b", ".x", "x/../y", "x/00000001.json"])
def test_a_hostile_tag_name_is_refused(store, write, name):
    with pytest.raises(UserError, match="not a tag name"):
        store.tags.move(name, store.publish(write("d"), "model"), None, "")


@pytest.mark.parametrize("key", ["", "../x", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_a_hostile_key_is_refused(store, key):
    for use in (store.records.find, store.workspace.progress, store.workspace.drop_progress):
        with pytest.raises(UserError, match="not a stage key"):
            use(key)


def test_no_path_leaves_the_root(store, tmp_path):
    for path in ("../x", "/etc/passwd", "a/../../x", ""):
        for use in (store.backend.read, store.backend.stat, store.backend.delete):
            with pytest.raises(StoreError):
                use(path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (store.backend.root / "blobs").mkdir()
    (store.backend.root / "blobs" / "way-out").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="symbolic link"):
        store.backend.read("blobs/way-out/secret")
    assert list(store.backend.list("blobs/")) == []


def test_a_hostile_manifest_is_not_materialised(store, write, tmp_path):
    model = store.publish(write("d"), "model")
    path = store.backend.root / manifest_path(model.digest)
    hostile = path.read_text().replace("config.json", "../../../evil")
    path.unlink()
    path.write_text(hostile)
    with pytest.raises(StoreError, match="not a manifest"):
        open_store(store.uri).fetch(model)
    assert not list(tmp_path.rglob("evil"))


def test_progress_belongs_to_a_key_and_is_dropped(store):
    (store.workspace.progress(KEY) / "step-10").write_text("state")
    assert (store.workspace.progress(KEY) / "step-10").read_text() == "state"
    assert store.workspace.progress(OTHER_KEY) != store.workspace.progress(KEY)
    store.workspace.drop_progress(KEY)
    store.workspace.drop_progress(KEY)
    assert list(store.workspace.progress(KEY).iterdir()) == []


def test_a_key_has_a_single_claimant_and_the_next_finds_the_result(store, write, draft):
    order, waited = [], []

    def second() -> None:
        with store.workspace.claim(KEY, waited.append) as progress:
            order.append("second" if store.records.find(KEY) else "too early")
            assert progress.is_dir()

    with (
        store.workspace.claim(KEY, claimant="run 12345678 (nightly)") as progress,
        store.workspace.claim(OTHER_KEY),
    ):  # another key does not wait
        other = threading.Thread(target=second)
        other.start()
        while not waited:
            time.sleep(0.001)
        (progress / "step-10").write_text("state")
        store.publish(write("d"), "model", draft())
        order.append("first")
        store.workspace.drop_progress(KEY)
    other.join(10)
    assert order == ["first", "second"]
    assert waited == ["the same stage in run 12345678 (nightly)", None]


def test_a_missing_file_inside_a_claim_is_the_callers_error(store):
    with pytest.raises(FileNotFoundError, match="the stage's own"), store.workspace.claim(KEY):
        raise FileNotFoundError("the stage's own")


def test_a_claim_ends_with_its_process(store, in_children):
    (code,) = in_children(lambda: (store.workspace.claim(KEY).__enter__(), os.kill(os.getpid(), signal.SIGKILL)))
    assert code == -signal.SIGKILL
    with store.workspace.claim(KEY, lambda _: pytest.fail("the holder is dead")):
        pass


def test_scratch_is_fresh_and_removed(store):
    with store.workspace.scratch() as first, store.workspace.scratch() as second:
        (first / "file").write_text("x")
        assert list(second.iterdir()) == []
    assert not first.exists()
    with pytest.raises(KeyError), store.workspace.scratch() as failed:
        raise KeyError
    assert not failed.exists()


def test_invalid_store_addresses_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="name a folder, or a URI that begins with file://, hf://, s3://"):
        open_store("ftp://host/store")
    for uri in ("s3://", "s3://bucket//store", "s3://bucket/../store"):
        with pytest.raises(UserError, match="write s3://bucket or s3://bucket/prefix"):
            open_store(uri)
    with pytest.raises(UserError, match="empty name"):
        open_store("")
    with pytest.raises(UserError, match="three slashes"):
        open_store("file://host/store")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_store(tmp_path / "file")
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "home" / "photos" / "cat.png").write_text("")
    with pytest.raises(UserError, match="is not a store"):
        open_store(tmp_path / "home")


def test_a_later_format_is_refused(store):
    path = store.backend.root / "format.json"
    path.chmod(0o644)
    path.write_text('{"format": 2}')
    with pytest.raises(UserError, match="store format 2"):
        open_store(store.uri)


def test_a_store_without_its_format_file_still_opens(store, write):
    reference = store.publish(write("d"), "model")
    (store.backend.root / "format.json").unlink()
    assert open_store(store.uri, writes=False).verify(reference) == []
    assert not (store.backend.root / "format.json").exists()
    assert open_store(store.uri).verify(reference) == []
    assert (store.backend.root / "format.json").exists()


def test_reading_a_store_writes_nothing(tmp_path):
    absent = open_store(tmp_path / "absent", writes=False)
    assert (list(absent.artifacts()), absent.tags.all(), collect(absent, delete=True).garbage) == ([], {}, ())
    assert not (tmp_path / "absent").exists()


def test_writes_into_the_cache_do_not_reach_the_store(store, write):
    reference = store.publish(write("d"), "model")
    for path in store.fetch(reference).rglob("*"):
        with contextlib.suppress(PermissionError, IsADirectoryError), path.open("r+b") as file:
            file.write(b"!")  # as by a bug in a process of root, whom no file mode stops
    assert store.verify(reference) == []
    assert (store.fetch(reference) / "config.json").read_text() == "{}"


def test_a_backend_that_ignores_conditional_writes_is_refused(tmp_path):
    class Careless(FolderBackend):
        def put(self, path, source, replaces=None):
            self.delete(path)
            return super().put(path, source, replaces)

    with pytest.raises(EnvironmentFault, match="ignores conditional writes"):
        check_backend(Careless(tmp_path / "store"))


def test_a_file_that_changes_during_publication_is_refused(store, write):
    directory = write("d")

    class Meddling(FolderBackend):
        def put(self, path, source, replaces=None):
            if isinstance(source, Path):
                source.write_text("meddled")
            return super().put(path, source, replaces)

    store.blobs.backend = Meddling(store.backend.root)
    with pytest.raises(StoreError, match="changed while it was being published"):
        store.publish(directory, "model")
    assert list(store.artifacts()) == []


def test_blobs_are_read_only(store, write):
    model = store.publish(write("d"), "model")
    for entry in store.manifest(model).files:
        assert stat.S_IMODE((store.backend.root / blob_path(entry.sha256)).stat().st_mode) == 0o444
