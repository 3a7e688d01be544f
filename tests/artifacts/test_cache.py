"""The cache of a remote store: bounded, evicts the least recently used artifact, and keeps artifacts in use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, open_store
from alignment_core.artifacts.cache import BOUND
from alignment_core.errors import UserError
from tests.processes import ended, in_child

KIB = 1024


@pytest.fixture
def remote(home: Path, bucket: str, tmp_path: Path) -> Store:
    return open_store(f"s3://{bucket}/{tmp_path.name}")


@pytest.fixture
def artifacts(remote: Store, tmp_path: Path) -> list[Reference]:
    """Three, of 100 KiB each."""
    references = []
    for number in range(3):
        folder = tmp_path / "made" / str(number)
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(os.urandom(100 * KIB))
        references.append(remote.publish(folder, "model"))
    return references


@pytest.fixture
def cached(remote: Store) -> Callable[[], set[str]]:
    return lambda: {path.name for path in remote.workspace.cache.iterdir()}


def limit(monkeypatch: pytest.MonkeyPatch, kib: float) -> None:
    monkeypatch.setenv(BOUND, str(kib / 2**20))


def use(store: Store, reference: Reference, when: float) -> Path:
    """Fetch at this time."""
    folder = store.fetch(reference)
    os.utime(folder, (when, when))
    return folder


def test_the_cache_evicts_the_least_recently_used_artifact(
    remote: Store, artifacts: list[Reference], cached: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = artifacts
    limit(monkeypatch, 250)
    use(remote, first, 1e9)
    use(remote, second, 2e9)
    remote.fetch(first)  # used just now, so that the second is the older one
    os.utime(remote.cache.folder(second.digest), (1e9, 1e9))
    assert (remote.fetch(third) / "weights").is_file()
    assert cached() == {first.digest, third.digest}
    assert (remote.fetch(second) / "weights").is_file(), "it is fetched again on use"


def test_held_artifacts_are_not_evicted_and_a_killed_process_holds_none(
    remote: Store, artifacts: list[Reference], cached: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = artifacts
    limit(monkeypatch, 50)
    with ExitStack() as stage:
        remote.fetch(first, stage)
        assert ended(in_child(lambda: open_store(remote.uri).fetch(second))) == 0
        assert cached() == {first.digest, second.digest}, "artifacts in use may exceed the bound"

        def holds_and_dies() -> None:
            remote.fetch(second, ExitStack())
            os.kill(os.getpid(), signal.SIGKILL)

        assert ended(in_child(holds_and_dies)) == -signal.SIGKILL
        remote.fetch(third)
        assert cached() == {first.digest, third.digest}
    remote.fetch(second)
    assert cached() == {second.digest}
    assert {path.name for path in (remote.workspace.root / "holds").iterdir()} == {second.digest}


def test_gc_keeps_cached_artifacts_that_are_held(
    remote: Store, artifacts: list[Reference], cached: Callable[[], set[str]]
) -> None:
    from alignment_core.artifacts import collect

    with ExitStack() as stage:
        remote.fetch(artifacts[0], stage)
        remote.fetch(artifacts[1])
        for path in remote.backend.list("leases/"):
            remote.backend.delete(path.path)
        report = collect(remote, delete=True, older_than=-1)
        assert report.of("cache") == [f"cache/{artifacts[1].digest}"]
        assert cached() == {artifacts[0].digest}


def test_published_outputs_are_cached_for_the_next_stage(remote: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = ProvenanceDraft(key="a" * 64, stage="sft", label="sft")
    with remote.workspace.scratch() as scratch:
        (scratch / "model").mkdir()
        (scratch / "model" / "weights").write_bytes(b"weights")
        published = remote.publish_outputs({"policy": (scratch / "model", "model")}, draft)

    def refused(*_: object) -> None:
        raise AssertionError("it was downloaded")

    monkeypatch.setattr(remote.backend, "download", refused)
    assert (remote.fetch(published["policy"]) / "weights").read_bytes() == b"weights"
    assert open_store(remote.uri).verify(published["policy"]) == []


def test_a_publisher_keeps_its_own_files(remote: Store, tmp_path: Path) -> None:
    """A folder outside the store's temporary folders belongs to the user."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    before = (folder / "weights").stat()
    remote.publish(folder, "model", ProvenanceDraft(key="a" * 64, stage="sft", label="sft"))
    after = (folder / "weights").stat()
    assert (after.st_mode, after.st_nlink) == (before.st_mode, before.st_nlink)


def test_a_cache_bound_that_is_no_number_is_refused(
    remote: Store, artifacts: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BOUND, "much")
    with pytest.raises(UserError, match="ALIGN_CACHE_GIB is 'much': give the size of the cache in GiB"):
        remote.fetch(artifacts[0])
