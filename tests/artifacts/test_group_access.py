"""Users of a group share a folder (``chmod g+ws``) with any umask: real users, each in a separate process.

The expected results come from POSIX: a member of a directory's group may list, enter and write into it if it has the
group's bits r, w and x (mode 0070), and reads a file that has the group's bit r (0040).
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Store, collect, open_store, prune
from alignment_core.artifacts.group_access import Closed, open_to_group
from alignment_core.artifacts.workspace import open_lock
from alignment_core.canonical import digest_of
from alignment_core.doctor import storage  # noqa: F401  (other users may not read where Python lies)
from alignment_core.errors import StoreError
from tests.align import align_here

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
ALICE, BOB, TEAM = 4242, 4343, 5000
As = Callable[..., Callable[[], None]]
InChildren = Callable[..., list[int]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that was given to the team. (pytest's own folders are private.)"""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(place) / "store"
        folder.mkdir()
        os.chown(folder, ALICE, TEAM)
        folder.chmod(0o2775)
        yield folder


@pytest.fixture
def user(folder: Path) -> As:
    """``user(BOB, umask, work)`` is ``work`` with the folder, done by a member of the team with a separate home."""

    def of(number: int, umask: int, work: Callable[[Path], object]) -> Callable[[], None]:
        home = folder.parent / f"home-{number}"
        home.mkdir(exist_ok=True)
        os.chown(home, number, number)

        def done() -> None:
            os.setgroups([TEAM])
            os.setgid(number)
            os.setuid(number)
            os.umask(umask)
            os.environ["ALIGN_HOME"] = str(home)
            work(folder)

        return done

    return of


def publish(name: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        store = open_store(folder)
        with store.workspace.scratch() as model:
            (model / "weights").write_text(name * 1000)
            reference = store.publish(model, "model", ProvenanceDraft(key=digest_of(name), stage="sft", label=name))
        assert (store.fetch(reference) / "weights").is_file()
        store.tags.move("policy", reference, store.tags.get("policy"), name)

    return work


def use_all(folder: Path) -> None:
    store = open_store(folder)
    references = [manifest.reference for manifest in store.artifacts()]
    assert references
    assert all(store.verify(reference) == [] for reference in references)
    assert all(store.fetch(reference).is_dir() for reference in references)
    assert store.tags.history("policy")
    assert collect(store, delete=True, older_than=-1).of("blob") == []


def closed_paths(folder: Path) -> list[Path]:
    """All paths closed to the team, except those meant for a single user: scratch space, checkpoints, read-only copies."""
    own = ("cache", "progress", "tmp")
    paths = [
        path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in own or path.parent == folder
    ]
    wanted = {True: stat.S_ISGID | 0o070, False: 0o040}
    return [path for path in paths if (path.stat().st_mode & wanted[path.is_dir()]) != wanted[path.is_dir()]]


@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077), (0o077, 0o077)])
def test_users_with_any_umask_publish_read_and_collect_in_one_store(
    folder: Path, user: As, in_children: InChildren, umasks: tuple[int, int]
) -> None:
    of_alice, of_bob = umasks
    assert in_children(user(ALICE, of_alice, publish("one"))) == [0]
    assert closed_paths(folder) == []
    assert in_children(user(BOB, of_bob, publish("two"))) == [0]
    assert closed_paths(folder) == []
    assert in_children(user(ALICE, of_alice, use_all)) == [0]
    assert in_children(user(BOB, of_bob, use_all)) == [0]


def test_concurrent_writers_of_a_group_never_meet_a_closed_directory(
    folder: Path, user: As, in_children: InChildren
) -> None:
    def tries(folder: Path) -> None:
        store = open_store(folder)
        for number in range(200):
            store.backend.put(f"uses/{digest_of(number)}", b"")
            list(store.backend.list("attachments/"))
            store.backend.put(f"attachments/{digest_of(str(number))}/{os.getuid()}", b"")

    assert in_children(user(ALICE, 0o077, tries), user(BOB, 0o077, tries)) == [0, 0]
    assert closed_paths(folder) == []


def test_a_lock_that_two_users_create_at_once_is_open_to_both(folder: Path, user: As, in_children: InChildren) -> None:
    """Each lock is new, so both meet while one of them creates it."""

    def creates(folder: Path) -> None:
        for number in range(2000):
            open_lock(folder / f"lock-{number}").close()

    assert in_children(user(ALICE, 0o077, creates), user(BOB, 0o077, creates)) == [0, 0]
    assert len(list(folder.iterdir())) == 2000, "nothing but the locks is left"


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_lock_needs_no_hard_links(refusal: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT or in FUSE: the folder of the machine's locks may lie there."""

    def link(*_: object, **__: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", link)
    for _ in range(2):
        open_lock(folder / "lock").close()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert (folder / "lock").stat().st_mode & 0o664 == 0o664


def test_a_store_that_is_made_in_a_folder_of_the_team_is_the_teams(
    folder: Path, user: As, in_children: InChildren
) -> None:
    assert in_children(user(ALICE, 0o077, lambda folder: publish("one")(folder / "new" / "store"))) == [0]
    assert in_children(user(BOB, 0o022, lambda folder: use_all(folder / "new" / "store"))) == [0]


def damage(folder: Path) -> None:
    """What version 46d8a3f made for a user with umask 077: directories that have the setgid bit and group write alone."""
    for path in folder.rglob("*"):
        if "cache" in path.parent.relative_to(folder).parts or (path.is_file() and path.stat().st_nlink > 1):
            continue  # whose modes were the same for every umask
        path.chmod(0o2720 if path.is_dir() else 0o600 if path.name == "lock" else 0o400)


def test_closed_folders_are_named_by_doctor_and_opened_by_the_owners_next_command(
    folder: Path, user: As, in_children: InChildren
) -> None:
    assert in_children(user(ALICE, 0o022, publish("one"))) == [0]
    damage(folder)

    def doctor(folder: Path) -> None:
        done = align_here(Path(os.environ["ALIGN_HOME"]), "store", "doctor", "--store", str(folder))
        assert done.returncode == 3, (done.stdout, done.stderr)
        assert f"{folder / 'blobs'}" in done.stdout
        assert "user 4242" in done.stdout
        assert f"align store doctor --store {folder}" in done.stdout

    assert in_children(user(BOB, 0o022, doctor)) == [0]
    listing = lambda folder: list(open_store(folder, writes=False).artifacts())  # noqa: E731
    assert in_children(user(ALICE, 0o077, listing)) == [0]
    assert [path for path in closed_paths(folder) if path.is_dir() or path.name == "lock"] == []

    def mends(folder: Path) -> None:
        assert align_here(Path(os.environ["ALIGN_HOME"]), "store", "doctor", "--store", str(folder)).returncode == 0

    assert in_children(user(ALICE, 0o077, mends)) == [0]
    assert closed_paths(folder) == [], "doctor checks every file"
    assert in_children(user(BOB, 0o022, use_all)) == [0]


def test_a_folder_given_to_a_group_without_its_content_is_repaired(
    folder: Path, user: As, in_children: InChildren
) -> None:
    folder.chmod(0o755)
    os.chown(folder, ALICE, ALICE)
    assert in_children(user(ALICE, 0o022, publish("one"))) == [0]
    os.chown(folder, ALICE, TEAM)
    folder.chmod(0o2775)
    assert in_children(user(ALICE, 0o022, lambda folder: open_store(folder))) == [0]
    assert in_children(user(BOB, 0o077, publish("two"))) == [0]


def test_users_without_access_see_closed_folders_with_their_owner(
    folder: Path, user: As, in_children: InChildren, caplog: pytest.LogCaptureFixture
) -> None:
    assert in_children(user(ALICE, 0o022, publish("one"))) == [0]
    (folder / "blobs" / "sha256").chmod(0o2720)

    def looks(folder: Path) -> None:
        command = f"align store doctor --store {folder}"
        assert open_to_group(folder) == [Closed(folder / "blobs" / "sha256", "user 4242", command)]
        open_store(folder, writes=False)
        assert f"blobs/sha256 in {folder} is closed to the group" in caplog.text
        assert f"the owner (user 4242) on this store opens them, such as `{command}`" in caplog.text

    assert in_children(user(BOB, 0o022, looks)) == [0]


def test_a_private_store_stays_closed(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        store: Store = open_store(tmp_path / "private")
        store.backend.put("uses/one", b"")
        publish("one")(tmp_path / "private")
    finally:
        os.umask(before)
    directories = [path for path in (tmp_path / "private").rglob("*") if path.is_dir()]
    assert all(path.stat().st_mode & 0o020 == 0 for path in directories)
    assert (tmp_path / "private").stat().st_mode & 0o077 == 0


def test_a_stage_that_one_user_interrupted_can_be_run_by_another(
    folder: Path, user: As, in_children: InChildren
) -> None:
    """Checkpoints are private, as they may be pickles: each user continues from their own."""
    key = digest_of("stage")

    def interrupted(word: str) -> Callable[[Path], None]:
        def work(folder: Path) -> None:
            with open_store(folder).workspace.claim(key) as progress:
                (progress / "state").write_text(word)

        return work

    def continues(word: str) -> Callable[[Path], None]:
        def work(folder: Path) -> None:
            with open_store(folder).workspace.claim(key) as progress:
                assert (progress / "state").read_text() == word
                assert stat.S_IMODE(progress.stat().st_mode) & 0o777 == 0o700

        return work

    def finishes(folder: Path) -> None:
        store = open_store(folder)
        with store.workspace.scratch() as model:
            (model / "weights").write_text("w")
            store.publish(model, "model", ProvenanceDraft(key=key, stage="sft", label="sft"))
        store.workspace.drop_progress(key)

    def collects(folder: Path) -> None:
        store = open_store(folder)
        garbage = collect(store, delete=True, older_than=-1).of("progress") + [
            item.path for item in prune(store, progress_days=0, rollouts_days=None, delete=True)
        ]
        assert garbage == [f"progress/{key}"]

    for number, word in ((ALICE, "of alice"), (BOB, "of bob")):
        assert in_children(user(number, 0o077, interrupted(word))) == [0]
    for number, word in ((ALICE, "of alice"), (BOB, "of bob")):
        assert in_children(user(number, 0o077, continues(word))) == [0]
    assert in_children(user(BOB, 0o077, finishes)) == [0]
    assert [path.name for path in (folder / "progress").iterdir()] == [key]
    assert in_children(user(ALICE, 0o077, collects)) == [0]
    assert list((folder / "progress").iterdir()) == []


def test_a_link_in_the_store_never_opens_its_target_to_the_group(
    folder: Path, user: As, in_children: InChildren
) -> None:
    """A member of the group may put a link anywhere in the store; opening the store must not open its target to others."""
    assert in_children(user(ALICE, 0o077, publish("one"))) == [0]
    private = folder.parent / "home-4242" / "private"

    def keeps_secret(folder: Path) -> None:
        private.mkdir(mode=0o700)
        (private / "key").write_text("secret")

    def puts_links(folder: Path) -> None:
        (folder / "tags" / "policy" / "more").symlink_to(private)
        (folder / "attachments").symlink_to(private)
        (folder / "lock").unlink(missing_ok=True)
        (folder / "lock").symlink_to(private / "key")

    def opens(folder: Path) -> None:
        open_to_group(folder, files=True)
        store = open_store(folder, writes=False)
        with pytest.raises(StoreError, match="symbolic links"):
            store.backend.delete(next(store.backend.list("tags/")).path)

    assert in_children(user(ALICE, 0o077, keeps_secret)) == [0]
    assert in_children(user(BOB, 0o022, puts_links)) == [0]
    assert in_children(user(ALICE, 0o077, opens)) == [0]
    open_to_group(folder, files=True)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "key").stat().st_mode) == 0o600
