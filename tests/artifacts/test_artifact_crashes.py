"""The store in trouble: SIGKILL at every step, concurrent writers, damaged bytes, a full disk."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment_core.artifacts import collect, open_store
from alignment_core.artifacts.paths import blob_path, manifest_path
from alignment_core.errors import Conflict, Corrupt, EnvironmentFault, NotFound

KEY = "a" * 64


# ------------------------------------------------------------------ killed publishers


@pytest.mark.parametrize("scratch", [False, True])
def test_fsync_and_link_order_survives_power_loss(scratch, store, write, draft, monkeypatch):
    # The hook only writes down the order of the real calls: no test can cut the power.
    events: list[tuple[str, str]] = []
    link, fsync = os.link, os.fsync

    def seen_link(source, target, **kwargs):
        events.append(("link", str(target)))
        assert ("fsync", str(source)) in events, "bytes reach the disk before their name does"
        link(source, target, **kwargs)

    def seen_fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "link", seen_link)
    monkeypatch.setattr(os, "fsync", seen_fsync)
    with store.workspace.scratch() as folder:
        files = shutil.copytree(write("d"), folder / "output") if scratch else write("d")
        model = store.publish(files, "model", draft())
    root = store.backend.root
    blobs = [str(root / blob_path(entry.sha256)) for entry in store.manifest(model).files]
    manifest, record = str(root / manifest_path(model.digest)), str(root / f"stages/{KEY}.json")
    for earlier, later in [*((blob, manifest) for blob in blobs), (manifest, record)]:
        between = events[events.index(("link", earlier)) : events.index(("link", later))]
        assert ("fsync", str(Path(earlier).parent)) in between, "a name is durable before anything refers to it"
    assert ("fsync", str(root / "stages")) in events[events.index(("link", record)) :]


# ------------------------------------------------------------------ several processes


def test_concurrent_publishers_of_the_same_artifact_all_succeed(store, write, draft, in_children):
    directory = write("d", {f"part-{n}": os.urandom(200_000) for n in range(6)})
    publish = lambda: open_store(store.uri).publish(directory, "model", draft())  # noqa: E731
    assert in_children(*[publish] * 4) == [0] * 4
    (manifest,) = store.artifacts()
    assert store.verify(manifest.reference) == []
    assert store.records.find(KEY).output == manifest.reference
    assert collect(store, older_than=-1).garbage == ()


def test_concurrent_results_of_one_key_converge(store, write, draft, in_children, tmp_path):
    def publish(number: int) -> None:
        directory = write(str(number), {"result": str(number)})
        (tmp_path / f"got-{number}").write_text(str(store.publish(directory, "model", draft())))

    assert in_children(*[lambda n=n: publish(n) for n in range(4)]) == [0] * 4
    assert {(tmp_path / f"got-{n}").read_text() for n in range(4)} == {str(store.records.find(KEY).output)}


def test_concurrent_fetches_give_every_process_the_whole_artifact(store, write, in_children):
    model = store.publish(write("d", {f"{n}/part": os.urandom(100_000) for n in range(8)}), "model")

    def fetch():
        fetched = open_store(store.uri).fetch(model)
        assert len([file for file in fetched.rglob("part") if file.stat().st_size == 100_000]) == 8

    assert in_children(*[fetch] * 4) == [0] * 4
    assert len(list(store.workspace.cache.iterdir())) == 1
    assert list(store.workspace.temporary.iterdir()) == []


def test_concurrent_tag_writers_have_one_winner_per_move(store, write, in_children):
    models = [store.publish(write(str(n), {"n": str(n)}), "model") for n in range(4)]
    wins = 8

    def move(mine):
        won = 0
        while won < wins:
            try:
                move = store.tags.move("policy", mine, store.tags.get("policy"), f"writer {mine.short}")
                won += move.to == mine
            except Conflict:
                pass

    assert in_children(*[lambda m=m: move(m) for m in models]) == [0] * 4
    history = store.tags.history("policy")
    assert [entry.number for entry in history] == list(range(1, 4 * wins + 1))
    assert [entry.previous for entry in history] == [None, *(entry.to for entry in history[:-1])]
    assert {model: sum(entry.to == model for entry in history) for model in models} == dict.fromkeys(models, wins)


# ------------------------------------------------------------------ damaged bytes


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 1)


DAMAGE = [(flip, Corrupt, "has the digest"), (truncate, Corrupt, "1 bytes"), (Path.unlink, NotFound, "has lost")]


@pytest.mark.parametrize(("damage", "error", "sentence"), DAMAGE)
@pytest.mark.parametrize("cached", [False, True])
def test_a_damaged_blob_is_named_and_healed_by_publishing_again(
    store, write, draft, damage, error, sentence, cached, caplog
):
    directory = write("d")
    model = store.publish(directory, "model", draft())
    entry = next(entry for entry in store.manifest(model).files if entry.path.startswith("weights"))
    if cached:
        store.fetch(model)
    damage(store.backend.root / blob_path(entry.sha256))

    reader = open_store(store.uri)
    if not cached:  # otherwise the cache still holds every byte, verified
        with pytest.raises(error, match=sentence) as caught:
            reader.fetch(model)
        assert entry.sha256 in str(caught.value)
        assert "weights/part-0.bin" in str(caught.value)
    (problem,) = reader.verify(model)
    assert entry.sha256 in problem
    with caplog.at_level(logging.WARNING):
        assert reader.records.find(KEY) is None  # so the stage runs again
    assert "has to run again" in caplog.text
    assert "weights/part-0.bin" in caplog.text

    assert reader.publish(directory, "model", draft()) == model
    assert reader.verify(model) == []
    assert (reader.fetch(model) / "weights/part-0.bin").read_text() == "zero"
    assert reader.records.find(KEY).output == model


def test_a_record_whose_output_is_lost_gives_way_to_the_next_result(store, write, draft):
    first = store.publish(write("d"), "model", draft())
    (store.backend.root / manifest_path(first.digest)).unlink()
    second = store.publish(write("e", {"other": "result"}), "model", draft())
    assert second != first
    assert store.records.find(KEY).output == second


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_manifest_or_record_is_healed_too(store, write, draft, damage):
    directory = write("d")
    model = store.publish(directory, "model", draft())
    for path in (manifest_path(model.digest), f"stages/{KEY}.json"):
        damage(store.backend.root / path)
        assert store.records.find(KEY) is None
        with pytest.raises(Corrupt):
            collect(store, delete=True, older_than=-1)  # deletes nothing while the needed objects are unknown
        assert store.publish(directory, "model", draft()) == model
        assert store.records.find(KEY).output == model
        assert store.verify(model) == []


def test_a_damaged_cache_is_replaced_from_the_store(store, write):
    model = store.publish(write("d"), "model")
    cached = store.fetch(model)
    (cached / "config.json").unlink()
    cached.chmod(0o755)
    (cached / "config.json").write_text('{"evil": 1}')
    (cached / "extra.py").write_text("not in the manifest")
    fetched = store.fetch(model)
    assert (fetched / "config.json").read_text() == "{}"
    assert not (fetched / "extra.py").exists()


def test_a_false_alarm_is_cleared_without_writing_the_blob_again(store, write, draft):
    model = store.publish(write("d"), "model", draft())
    entry = store.manifest(model).files[0]
    store.backend.put(f"suspects/{entry.sha256}", b"")
    inode = (store.backend.root / blob_path(entry.sha256)).stat().st_ino
    assert store.records.find(KEY) is None
    store.publish(write("d"), "model", draft())
    assert store.records.find(KEY) is not None
    assert (store.backend.root / blob_path(entry.sha256)).stat().st_ino == inode


def test_suspicion_of_a_deleted_blob_does_not_affect_its_next_publication(store, write, draft):
    model = store.publish(write("d"), "model", draft())
    for entry in store.manifest(model).files:
        store.backend.put(f"suspects/{entry.sha256}", b"")
        store.backend.delete(blob_path(entry.sha256))
    store.publish(write("d"), "model", draft())
    assert store.records.find(KEY) is not None


# ------------------------------------------------------------------ a full disk


def test_a_file_that_does_not_fit_leaves_no_half_artifact(store, write, draft, in_children):
    directory = write("d", {"a": "small", "big": b"\0" * 2**20})

    def publish():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, resource.RLIM_INFINITY))
        with pytest.raises(EnvironmentFault, match="larger than"):
            store.publish(directory, "model", draft())

    assert in_children(publish) == [0]
    assert list(store.artifacts()) == []
    assert store.records.find(KEY) is None
    assert list(store.workspace.temporary.iterdir()) == []
    store.publish(directory, "model", draft())


def test_a_full_disk_is_reported_and_leaves_no_partial_artifact(tmp_path, write, draft):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small file system takes root")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", disk], check=True)
        store = open_store(disk / "store")
        small = store.publish(write("small"), "model")
        big = write("big", {f"{n}": os.urandom(2**18) for n in range(8)})
        with pytest.raises(EnvironmentFault, match="disk is full"):
            store.publish(big, "model", draft())
        assert [manifest.reference for manifest in store.artifacts()] == [small]
        assert store.records.find(KEY) is None
        assert store.verify(small) == []
        assert len(collect(store, delete=True, older_than=-1).of("blob")) >= 2
        store.publish(write("fits", {"one": os.urandom(2**18)}), "model")
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        assert store.verify(store.publish(big, "model", draft())) == []


def test_a_file_that_is_larger_than_the_free_space_is_not_begun(tmp_path, monkeypatch):
    source = tmp_path / "weights"
    source.write_bytes(b"\0" * 2**20)
    copied = []
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**19))
    monkeypatch.setattr("shutil.copyfile", lambda *paths: copied.append(paths))
    monkeypatch.setattr("alignment_core.artifacts.folder._clone", lambda *_: False)  # where it can, no room is needed
    store = open_store(tmp_path / "store")
    with pytest.raises(
        EnvironmentFault, match=r"weights needs 1\.0 MiB in .*, which has 0\.5 MiB left: the disk is full"
    ):
        store.backend.put("blobs/one", source)
    assert copied == []
    assert store.backend.stat("blobs/one") is None
