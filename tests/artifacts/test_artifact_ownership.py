"""Files that may contain code (progress, Prefect's results) are read only if this user or root wrote them."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, collect, open_store
from alignment_core.artifacts.permissions import check_ours, make_private
from alignment_core.canonical import digest_of
from alignment_core.doctor.machine import own_disk
from alignment_core.errors import EnvironmentFault
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import RunName, Ticket
from alignment_core.home import align_home

KEY = "a" * 64
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def test_progress_is_private_even_from_earlier_versions(store):
    (store.workspace.all_progress / KEY).mkdir(parents=True, mode=0o775)
    before = os.umask(0o002)
    try:
        for directory in (store.workspace.progress(KEY), store.workspace.progress("b" * 64)):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    with store.workspace.claim(KEY) as progress:
        assert stat.S_IMODE(progress.stat().st_mode) == 0o700


@AS_ROOT
def test_files_of_another_user_are_not_read(store, monkeypatch):
    theirs = store.workspace.progress(KEY)
    (theirs / "state").write_bytes(b"a pickle")
    os.chown(theirs / "state", 4242, 4242)
    with pytest.raises(EnvironmentFault, match=r"state belongs to user 4242; files of another user are not read"):
        check_ours(theirs)
    os.chown(theirs, 4242, 4242)
    with store.workspace.claim(KEY) as own:
        assert own == theirs.with_name(f"{KEY}-0"), "it is left alone, and blocks no other user"
        assert not (own / "state").exists()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert make_private(theirs) == check_ours(theirs) == theirs


@AS_ROOT
def test_root_continues_from_progress_of_the_stores_owner(store):
    give(store.backend.root, 4242)
    with store.workspace.claim(KEY) as progress:
        (progress / "state").write_bytes(b"a pickle")
    give(progress, 4242)
    with store.workspace.claim(KEY) as again:
        assert check_ours(again) == progress
    os.chown(progress / "state", 4343, 4343)
    with pytest.raises(EnvironmentFault, match="state belongs to user 4343"):
        check_ours(progress)
    (progress / "format.json").write_text("{}")
    give(progress, 4343)
    with pytest.raises(EnvironmentFault, match="state belongs to user 4343"):
        check_ours(progress / "state")


@AS_ROOT
def test_root_squashed_to_nobody_trusts_its_own_files(store, monkeypatch):
    lstat, fstat = Path.lstat, os.fstat  # stand for NFS with root_squash, which needs a server
    real = store.workspace.progress(KEY)

    def squashed(status: os.stat_result) -> os.stat_result:
        return os.stat_result((*status[:4], 65534, 65534, *status[6:]))

    monkeypatch.setattr(Path, "lstat", lambda path: squashed(lstat(path)))
    monkeypatch.setattr(os, "fstat", lambda file: squashed(fstat(file)))
    assert check_ours(make_private(real)) == real


@AS_ROOT
def test_a_home_of_another_user_works_for_root_and_for_its_owner_after_root(monkeypatch, in_children, request):
    place = tempfile.TemporaryDirectory()  # pytest's own folders are private
    request.addfinalizer(place.cleanup)
    home = Path(place.name)
    monkeypatch.setenv("ALIGN_HOME", place.name)
    give(home, 4242)

    def owner(work):
        def done():
            os.setgroups([])
            os.setgid(4242)
            os.setuid(4242)
            work()

        return done

    def publish():
        with open_store().workspace.scratch() as model:
            (model / "weights").write_text("w")
            open_store().publish(model, "model")

    def collects():
        assert collect(open_store(), delete=True, older_than=-1).of("temporary") == []

    def use_machine():
        with MachineQueue(align_home() / "locks").use(Ticket(waits=lambda _: None, label="sft", run=RunName("a", "b"))):
            pass

    assert in_children(owner(publish)) == [0]
    lock = home / "store" / "lock"
    lock.unlink(missing_ok=True)
    shutil.rmtree(home / "store" / "leases")
    assert in_children(publish) == [0]
    collect(open_store(), delete=True, older_than=-1)
    assert in_children(use_machine) == [0]
    assert lock.stat().st_uid == 0
    theirs = home / "store" / "tmp" / "scratch-of-root"
    theirs.mkdir(mode=0o700)
    os.utime(theirs, (0, 0))
    (home / "store" / "cache").mkdir(exist_ok=True)
    (home / "store" / "cache" / ("c" * 64)).mkdir(mode=0o700)
    assert in_children(owner(publish)) == [0]
    assert in_children(owner(collects)) == [0]
    assert in_children(owner(use_machine)) == [0]
    assert theirs.is_dir()


@AS_ROOT
def test_users_of_a_group_share_a_folder_of_the_group(in_children, request, monkeypatch):
    place = tempfile.TemporaryDirectory()
    request.addfinalizer(place.cleanup)
    folder, homes = Path(place.name) / "store", Path(place.name)
    homes.chmod(0o755)
    folder.mkdir()
    os.chown(folder, 4242, 5000)
    folder.chmod(0o2775)

    def of(user, work):
        def done():
            os.setgroups([5000])
            os.setgid(user)
            os.setuid(user)
            os.umask(0o022)
            os.environ["ALIGN_HOME"] = str(homes / f"home-{user}")
            work(open_store(folder))

        home = homes / f"home-{user}"
        home.mkdir(exist_ok=True)
        os.chown(home, user, user)
        return done

    def publish(name, tag=None):
        def work(store):
            with store.workspace.scratch() as model:
                (model / "weights").write_text("w" * 1000)
                (model / "name").write_text(name)
                reference = store.publish(model, "model", ProvenanceDraft(key=digest_of(name), stage="sft", label=name))
            assert (store.fetch(reference) / "name").read_text() == name
            store.tags.move("policy", reference, store.tags.get("policy"), name)

        return work

    def reads(store):
        assert [move.reason for move in store.tags.history("policy")] == ["one", "two"]
        assert all(store.verify(manifest.reference) == [] for manifest in store.artifacts())
        assert collect(store, delete=True, older_than=-1).of("blob") == []

    assert in_children(of(4242, publish("one"))) == [0]
    assert in_children(of(4343, publish("two"))) == [0]
    assert in_children(of(4242, reads), of(4343, reads)) == [0, 0]
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)

    def open_without_access():
        os.setgroups([])
        os.setuid(4343)
        os.environ["ALIGN_HOME"] = str(homes / "home-4343")
        with pytest.raises(EnvironmentFault, match="permission denied; give this user read and write access"):
            open_store(folder)

    assert in_children(open_without_access) == [0], "a user without write access gets an error"


def test_a_new_home_is_private_and_an_existing_home_keeps_its_mode(tmp_path, monkeypatch):
    def mode(name: str) -> int:
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / name))
        return stat.S_IMODE(align_home().stat().st_mode)

    (tmp_path / "before" / "store").mkdir(parents=True)
    (tmp_path / "before").chmod(0o755)
    assert (mode("new/home"), mode("before")) == (0o700, 0o755)
    assert own_disk(tmp_path / "new/home")[0] == "ok"
    state, sentence = own_disk(tmp_path / "before")
    assert (state, "open to other users (mode 0755)" in sentence) == ("warning", True)


def give(tree: Path, user: int) -> None:
    for path in (tree, *tree.rglob("*")):
        os.chown(path, user, user)


def test_a_directory_removed_while_being_made_private_is_created_again(store, monkeypatch):
    lstat = Path.lstat

    def gone_first(path):
        monkeypatch.undo()
        path.rmdir()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", gone_first)
    assert store.workspace.progress(KEY).is_dir()
