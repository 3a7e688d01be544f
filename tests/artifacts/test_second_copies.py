"""The space of a model in a folder store: links to read-only files, or copies that can be freed.

Bytes on the disk are counted as by ``du``: each inode once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, Store, cache, open_store
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.paths import blob_path
from tests.align import align_here
from tests.artifacts.conftest import age

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
SIZE = 3 << 20
ALICE = 4242


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of another user, on a file system without reflinks. (pytest's own folders are private.)"""
    monkeypatch.setattr("alignment_core.artifacts.folder._FICLONE", 0)  # a call that no file system knows
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, ALICE, ALICE)
        yield Path(place)


@pytest.fixture
def model(write: Callable[..., Path]) -> Path:
    return write("model", {"model.safetensors": b"w" * SIZE, "config.json": "{}"})


def used(folder: Path) -> int:
    """Bytes of all files, each inode once."""
    return sum(
        {
            status.st_ino: status.st_size for path in folder.rglob("*") if (status := path.lstat()) and path.is_file()
        }.values()
    )


def as_alice(work: Callable[[], object]) -> Callable[[], None]:
    def done() -> None:
        os.setgroups([])
        os.setgid(ALICE)
        os.setuid(ALICE)
        os.environ["ALIGN_HOME"] = os.environ["HOME"] = "/nonexistent"
        work()

    return done


def publish(folder: Path) -> Reference:
    store = open_store(folder / "store")
    with store.workspace.scratch() as scratch:
        (scratch / "model.safetensors").write_bytes(b"w" * SIZE)
        return store.publish(scratch, "model")


@AS_ROOT
def test_a_publisher_fetches_a_model_read_only_without_a_second_copy(
    folder: Path, in_children: Callable[..., list[int]]
) -> None:
    def work() -> None:
        reference = publish(folder)
        store = open_store(folder / "store")
        fetched = store.fetch(reference) / "model.safetensors"
        assert SIZE <= used(folder) < 1.1 * SIZE
        for mode in ("r+b", "wb", "ab"):
            with pytest.raises(PermissionError):
                fetched.open(mode)
        with pytest.raises(PermissionError):
            fetched.unlink()
        assert isinstance(store.backend, FolderBackend)
        blob = blob_path(store.manifest(reference).files[0].sha256)
        assert store.backend.why_copied(blob) == ""

    assert in_children(as_alice(work)) == [0]


@AS_ROOT
def test_root_gets_a_copy_of_a_linked_file_so_that_no_write_reaches_the_store(
    folder: Path, in_children: Callable[..., list[int]]
) -> None:
    references: list[Reference] = []
    assert in_children(as_alice(lambda: open_store(folder / "store").fetch(publish(folder)))) == [0]
    store = open_store(folder / "store", writes=False)
    references = [manifest.reference for manifest in store.artifacts()]
    with ExitStack() as stage:
        fetched = store.fetch(references[0], stage) / "model.safetensors"
        assert fetched.stat().st_nlink == 1
        fetched.write_bytes(b"of a careless process")
    assert store.verify(references[0]) == []
    assert (store.fetch(references[0]) / "model.safetensors").read_bytes() == b"w" * SIZE, "changed files are replaced"


@AS_ROOT
def test_an_open_link_stays_readable_while_root_replaces_it(
    folder: Path, in_children: Callable[..., list[int]]
) -> None:
    assert in_children(as_alice(lambda: open_store(folder / "store").fetch(publish(folder)))) == [0]
    store = open_store(folder / "store", writes=False)
    reference = next(iter(store.artifacts())).reference
    weights = store.cache.folder(reference.digest) / "model.safetensors"
    assert weights.stat().st_nlink == 2
    with ExitStack() as of_alice, weights.open("rb") as opened:
        store.cache.hold(reference.digest, of_alice)
        assert store.fetch(reference) / "model.safetensors" == weights
        assert weights.stat().st_nlink == 1
        assert weights.stat().st_mode & 0o222 == 0
        assert opened.read() == weights.read_bytes() == b"w" * SIZE


@AS_ROOT
def test_a_second_copy_is_reported_once_with_its_reason_and_the_command_to_free_it(
    store: Store, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("alignment_core.artifacts.folder._FICLONE", 0)  # a call that no file system knows
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr("alignment_core.artifacts.cache.LARGE", SIZE)
    for _ in range(2):
        store.fetch(store.publish(model, "model"))
        store.workspace.discard(store.workspace.cache)
    assert caplog.text.count("a second time") == 1
    assert "this user, such as root, may write into read-only files" in caplog.text
    assert "`align artifacts gc --delete --cache-days 0`" in caplog.text
    doctor = align_here(home, "store", "doctor", "--store", store.uri)
    assert "each artifact in use is stored twice: the file system has no reflinks" in doctor.stdout
    assert [path for path in store.workspace.temporary.rglob("*") if path.is_file()] == []


def test_gc_frees_unused_copies_and_the_next_fetch_restores_them(
    store: Store, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment_core.artifacts.folder._FICLONE", 0)  # a call that no file system knows
    monkeypatch.setattr("alignment_core.artifacts.folder._link", lambda source, destination: False)
    reference = store.publish(model, "model")
    store.tags.move("policy", reference, None, "kept")
    alone = used(Path(store.uri))
    fetched = store.fetch(reference)
    assert used(Path(store.uri)) >= alone + SIZE
    collect = ("artifacts", "gc", "--store", store.uri, "--json", "--delete")

    def garbage(*more: str) -> list[tuple[str, int]]:
        garbage = json.loads(align_here(home, *collect, *more).stdout)["garbage"]
        return [(item["what"], item["size"]) for item in garbage]

    assert garbage("--cache-days", "1") == [], "it was used just now"
    with ExitStack() as stage:
        store.fetch(reference, stage)
        assert garbage("--cache-days", "0") == [], "it is in use"
    assert garbage("--cache-days", "0") == [("cache", SIZE + 2)]
    assert not fetched.exists()
    assert used(Path(store.uri)) <= alone + 100
    assert (store.fetch(reference) / "model.safetensors").stat().st_size == SIZE
    os.utime(fetched, (0, 0))
    assert garbage("--cache-days", "1") == [("cache", SIZE + 2)]
    assert store.verify(reference) == []


def test_gc_keeps_links_which_free_nothing(store: Store, model: Path) -> None:
    from alignment_core.artifacts import prune

    reference = store.publish(model, "model")
    folder = store.fetch(reference)
    blob = Path(store.uri, blob_path(store.manifest(reference).files[1].sha256))
    folder.chmod(0o755)
    for entry in store.manifest(reference).files:
        (folder / entry.path).unlink()
        os.link(Path(store.uri, blob_path(entry.sha256)), folder / entry.path)
    assert blob.stat().st_nlink == 2
    age(store, 2)
    assert prune(store, None, None, delete=True, cache_days=0) == []
    assert folder.is_dir()
