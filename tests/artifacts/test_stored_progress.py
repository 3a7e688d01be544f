"""In-stage progress in the store: complete checkpoints are stored and resumed from, and no other user's pickle is read."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store, collect, open_store, prune, stored_progress
from alignment_core.artifacts.paths import SNAPSHOTS, blob_path
from alignment_core.artifacts.stored_progress import StoredProgress, settled
from alignment_core.errors import Stopped
from alignment_core.files import write_whole
from alignment_core.training.checkpoints import drop_older, newest_progress
from tests.processes import ended, in_child, wait_until

KEY = "b" * 64
Machine = Callable[[str], tuple[Store, Path]]


@pytest.fixture
def machine(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The S3 store and the progress folder of the stage, as a machine of this name has them."""

    def enter(name: str) -> tuple[Store, Path]:
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / name))
        store = open_store(f"s3://{bucket}/{tmp_path.name}")
        return store, store.workspace.progress(KEY)

    return enter


def checkpoint(folder: Path, step: int, complete: bool = True) -> None:
    """As training leaves it."""
    inside = folder / f"step-{step:08d}" / "state"
    inside.mkdir(parents=True)
    (inside / "weights.safetensors").write_bytes(b"weights of step %d" % step)
    if complete:
        (inside.parent / "complete.json").write_text(f'{{"step": {step}}}')


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in settled(folder)}


def test_another_machine_continues_from_complete_progress(machine: Machine) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    checkpoint(folder, 20, complete=False)
    (folder / "shard-1.parquet").write_bytes(b"rows")
    (folder / "shard-2.partial").write_bytes(b"half")
    assert StoredProgress(store, KEY).push(folder)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == contents(folder)
    assert set(contents(theirs)) == {
        "shard-1.parquet",
        "step-00000010/complete.json",
        "step-00000010/state/weights.safetensors",
    }


def test_no_pickle_is_sent(machine: Machine) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    checkpoint(folder, 20)
    (folder / "step-00000020" / "state" / "optimizer.pt").write_bytes(b"cposix")
    (folder / "evil.pkl").write_bytes(b"cposix")
    StoredProgress(store, KEY).push(folder)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert set(contents(theirs)) == {"step-00000010/complete.json", "step-00000010/state/weights.safetensors"}


def test_a_snapshot_that_lists_a_pickle_is_not_taken(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Written by a user with write access to the store."""
    store, folder = machine("one")
    checkpoint(folder, 10)
    evil = folder / "step-00000010" / "state" / "weights.safetensors"
    evil.write_bytes(b"cposix")
    StoredProgress(store, KEY).push(folder)
    stored = store.backend.stat(f"{SNAPSHOTS}{KEY}.json")
    assert stored is not None
    forged = store.backend.read(stored.path).replace(b"weights.safetensors", b"optimizer.pt")
    assert store.backend.put(stored.path, forged, replaces=stored.version)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert list(theirs.iterdir()) == []
    assert "lists files that may be pickles" in caplog.text


def test_a_returning_machine_pulls_newer_progress_and_keeps_its_local_files(
    machine: Machine,
) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    StoredProgress(store, KEY).push(folder)
    (folder / "look-10.json").write_text("{}")
    StoredProgress(store, KEY).pull(folder)
    assert "look-10.json" in contents(folder), "there was no push since: this is the newest"
    there, theirs = machine("two")
    other = StoredProgress(there, KEY)
    other.pull(theirs)
    checkpoint(theirs, 20)
    other.push(theirs)
    again, mine = machine("one")
    StoredProgress(again, KEY).pull(mine)
    assert contents(mine) == contents(theirs)


def test_checkpoints_are_stored_during_a_stage_and_once_more_at_its_stop(machine: Machine) -> None:
    store, folder = machine("one")
    progress = StoredProgress(store, KEY)

    def stage() -> None:
        with progress.mirrored(folder, seconds=3600):
            checkpoint(folder, 10)
            assert wait_until(lambda: (folder / ".snapshot").is_file(), 30)
            checkpoint(folder, 20)
            raise Stopped("told to")

    with pytest.raises(Stopped):
        stage()
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert "step-00000020/complete.json" in contents(theirs)


def test_a_killed_machine_loses_only_progress_after_its_last_checkpoint(machine: Machine) -> None:
    store, folder = machine("one")

    def stage() -> None:
        with StoredProgress(store, KEY).mirrored(folder, seconds=3600):
            checkpoint(folder, 10)
            assert wait_until(lambda: (folder / ".snapshot").is_file(), 30)
            (folder / "later.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(stage)) == -signal.SIGKILL
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert set(contents(theirs)) == {"step-00000010/complete.json", "step-00000010/state/weights.safetensors"}


def test_only_new_files_are_uploaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = machine("one")
    (folder / "shard-1.parquet").write_bytes(b"rows")
    progress = StoredProgress(store, KEY)
    progress.push(folder)
    sent, put = [], store.backend.put

    def counted(path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        sent.append(path)
        return put(path, source, replaces)

    monkeypatch.setattr(store.backend, "put", counted)
    progress.push(folder)
    assert sent == []
    (folder / "shard-2.parquet").write_bytes(b"more")
    progress.push(folder)
    assert len([path for path in sent if path.startswith("blobs/")]) == 1


def test_a_checkpoint_deleted_during_a_push_is_no_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    link, gone = os.link, []

    def vanishes(*arguments: Path) -> None:
        if not gone:
            gone.append(os.rename(folder / "step-00000010", folder / "step-00000010.partial"))
        link(*arguments)

    monkeypatch.setattr(os, "link", vanishes)
    progress = StoredProgress(store, KEY)
    assert not progress.push(folder)
    checkpoint(folder, 20)
    assert progress.push(folder)


def test_files_that_appear_during_a_push_do_not_hold_it_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the images that episodes of engines that sample ahead show."""
    store, folder = machine("one")
    checkpoint(folder, 10)
    (folder / "observed").mkdir()
    before = contents(folder)
    link = os.link

    def appears(*arguments: Path) -> None:
        (folder / "observed" / f"{len(contents(folder))}.json").write_text("{}")
        link(*arguments)

    monkeypatch.setattr(os, "link", appears)
    assert StoredProgress(store, KEY).push(folder)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == before
    assert len(contents(folder)) == len(before) + 2


def test_a_checkpoint_that_completes_while_files_are_listed_waits_for_the_next_push(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it refers to may be missing in the list."""
    store, folder = machine("one")
    checkpoint(folder, 10)
    lists = list[int]()

    def listed(of: Path) -> dict[str, os.stat_result]:
        lists.append(1)
        if len(lists) == 2:
            checkpoint(folder, 20)
        return settled(of)

    monkeypatch.setattr(stored_progress, "settled", listed)
    progress = StoredProgress(store, KEY)
    assert progress.push(folder)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert {path.partition("/")[0] for path in contents(theirs)} == {"step-00000010"}
    assert progress.push(folder)
    StoredProgress(there, KEY).pull(theirs)
    assert {path.partition("/")[0] for path in contents(theirs)} == {"step-00000010", "step-00000020"}


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
def test_a_push_that_is_slower_than_saves_stores_the_checkpoint_that_they_delete(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    store, folder = machine("one")
    progress = StoredProgress(store, KEY)
    checkpoint(folder, 10)
    note = folder / "save-seconds.json"
    write_whole(note, lambda file: file.write(b"1.0"))
    before = contents(folder)
    put = store.blobs.put
    begun, saved = threading.Event(), threading.Event()

    def refuse(*_: object) -> None:
        raise PermissionError("no hard links")

    def slow(*arguments: Any) -> bool:
        begun.set()
        assert saved.wait(30)
        return put(*arguments)

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(store.blobs, "put", slow)
    with ThreadPoolExecutor() as pool:
        push = pool.submit(progress.push, folder)
        assert begun.wait(30)
        checkpoint(folder, 20)
        drop_older(folder, 20)
        write_whole(note, lambda file: file.write(b"2.0"))
        assert newest_progress(folder) == folder / "step-00000020"
        after = contents(folder)
        saved.set()
        assert push.result()
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == before
    assert {path.name for path in folder.iterdir()} == {".snapshot", "save-seconds.json", "step-00000020"}
    assert progress.push(folder)
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == after


def test_a_file_that_grows_during_a_push_is_pushed_soon_after(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = machine("one")
    growing = folder / "lm-eval.log"
    growing.write_text("one\n")
    put = store.blobs.put

    def grows_once(*arguments: Any) -> bool:
        if growing.read_text() == "one\n":
            growing.write_text("one\ntwo\n")
        return put(*arguments)

    monkeypatch.setattr(store.blobs, "put", grows_once)
    progress = StoredProgress(store, KEY)
    assert not progress.push(folder)
    assert progress.push(folder)
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == {"lm-eval.log": b"one\ntwo\n"}


def test_the_next_process_removes_what_one_killed_during_a_push_left(machine: Machine) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stage() -> None:
        store.blobs.put_files = killed  # type: ignore[method-assign,assignment]
        StoredProgress(store, KEY).push(folder)

    assert ended(in_child(stage)) == -signal.SIGKILL
    (left,) = [path for path in folder.iterdir() if path.name != "step-00000010"]
    assert set(contents(folder)) == {"step-00000010/complete.json", "step-00000010/state/weights.safetensors"}
    assert newest_progress(folder) == folder / "step-00000010"
    with StoredProgress(store, KEY).mirrored(folder, seconds=3600):
        assert not left.exists()


def test_gc_keeps_progress_until_its_stage_drops_it(machine: Machine) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    progress = StoredProgress(store, KEY)
    progress.push(folder)
    assert collect(store, delete=True, older_than=-1).of("blob") == []
    assert [garbage.what for garbage in prune(store, progress_days=1, rollouts_days=None)] == []
    progress.drop()
    assert len(collect(store, delete=True, older_than=-1).of("blob")) == 2


def test_unused_progress_is_pruned_by_age(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    StoredProgress(store, KEY).push(folder)
    now = store.backend.now()
    monkeypatch.setattr(store.backend, "now", lambda: now + 3 * 86400)
    assert prune(store, progress_days=1, rollouts_days=None, delete=True, used=[KEY]) == []
    (pruned,) = [garbage for garbage in prune(store, 1, None, delete=True) if garbage.what == "snapshot"]
    assert pruned.path == f"{SNAPSHOTS}{KEY}.json"
    assert store.backend.stat(pruned.path) is None


@pytest.mark.parametrize("damage", ["lost", "other bytes"])
def test_a_damaged_snapshot_stops_no_stage(machine: Machine, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """The stage that it belongs to is the one that would make it again."""
    store, folder = machine("one")
    checkpoint(folder, 20)
    StoredProgress(store, KEY).push(folder)
    weights = (folder / "step-00000020" / "state" / "weights.safetensors").read_bytes()
    there, theirs = machine("two")
    checkpoint(theirs, 5)
    before = contents(theirs)
    path = blob_path(hashlib.sha256(weights).hexdigest())
    there.backend.delete(path)
    if damage == "other bytes":
        there.backend.put(path, weights[::-1])
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == (before if damage == "lost" else {}), "what is there is used, or nothing is"
    assert ("goes on from what this machine has" if damage == "lost" else "starts from the beginning") in caplog.text
    StoredProgress(there, KEY).pull(theirs)


def test_files_collected_after_another_machines_push_are_uploaded_again(machine: Machine) -> None:
    store, folder = machine("one")
    checkpoint(folder, 10)
    mine = StoredProgress(store, KEY)
    assert mine.push(folder)
    there, theirs = machine("two")
    checkpoint(theirs, 30)
    assert StoredProgress(there, KEY).push(theirs)
    collect(store, delete=True, older_than=-10)
    checkpoint(folder, 20)
    assert mine.push(folder)
    third, fresh = machine("three")
    StoredProgress(third, KEY).pull(fresh)
    assert contents(fresh) == contents(folder)


def test_retention_leaves_the_bytes_that_progress_shares_with_old_rollouts(machine: Machine, tmp_path: Path) -> None:
    store, folder = machine("one")
    old = tmp_path / "old"
    old.mkdir()
    (old / "shard-1.parquet").write_bytes(b"rows")
    rollouts = store.publish(old, "rollouts")
    (folder / "shard-1.parquet").write_bytes(b"rows")
    assert StoredProgress(store, KEY).push(folder)
    pruned = prune(store, None, -1.0, delete=True)
    assert [garbage.path for garbage in pruned] == [str(rollouts)]
    there, theirs = machine("two")
    StoredProgress(there, KEY).pull(theirs)
    assert contents(theirs) == contents(folder)
