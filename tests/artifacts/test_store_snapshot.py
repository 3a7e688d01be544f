"""A store as it was a moment ago, and the requests to a server that it saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.paths import pruned_path, stage_path, suspect_path, use_path
from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.canonical import digest_of
from tests.servers.faulty import Faulty
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def proxy(bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """The server of the bucket, behind a proxy that counts requests."""
    with Faulty(s3_server.url) as counting:
        monkeypatch.setenv("AWS_ENDPOINT_URL", counting.url)
        yield counting


def test_a_server_is_probed_once_an_hour(proxy: Faulty, bucket: str, tmp_path: Path) -> None:
    uri = f"s3://{bucket}/{tmp_path.name}"
    open_store(uri)
    probes = proxy.count("PUT", "probe-")
    assert probes
    open_store(uri)
    assert proxy.count("PUT", "probe-") == probes
    (mark,) = (tmp_path / "probed").iterdir()
    os.utime(mark, (mark.stat().st_mtime - 3601,) * 2)
    open_store(uri)
    assert proxy.count("PUT", "probe-") == 2 * probes


def test_many_finished_stages_are_found_with_a_few_listings(
    proxy: Faulty, bucket: str, tmp_path: Path, make: Callable[..., Reference]
) -> None:
    store = open_store(f"s3://{bucket}/{tmp_path.name}")
    for number in range(5):
        make(store, f"model-{number}")
    rollouts = make(store, "rollouts", kind="rollouts")
    store.summaries()
    proxy.requests.clear()
    recent = StoreSnapshot(store, uses=True)
    assert [recent().records.find(digest_of(f"model-{number}")).output.kind for number in range(5)] == ["model"] * 5  # type: ignore[union-attr]
    assert recent().records.find(digest_of("unknown")) is None
    assert len(proxy.requests) == 5
    assert recent().records.find(digest_of("rollouts")).output == rollouts  # type: ignore[union-attr]
    targets = [(request.method, request.target.split(f"/{tmp_path.name}/")[-1]) for request in proxy.requests[5:]]
    assert targets == [("PUT", f"uses/{rollouts.digest}"), ("HEAD", f"pruned/{rollouts.digest}")]


def test_each_use_is_noted_and_a_mere_look_is_not(bucket: str, tmp_path: Path, make: Callable[..., Reference]) -> None:
    store = open_store(f"s3://{bucket}/{tmp_path.name}")
    rollouts = make(store, "rollouts", kind="rollouts")

    def noted() -> str | None:
        entry = store.backend.stat(use_path(rollouts.digest))
        return entry and entry.version

    versions = [noted()]
    recent = StoreSnapshot(store, uses=True)
    for _ in range(2):  # in the second, the version that was listed is not the one that is there
        assert recent().records.find(digest_of("rollouts")) is not None
        versions.append(noted())
    assert len(set(versions)) == 3
    looks = StoreSnapshot(store, uses=False)
    assert looks().records.find(digest_of("rollouts"), use=False) is not None
    assert noted() == versions[-1]
    store.backend.put(pruned_path(rollouts.digest), b"pruned")
    assert recent().records.find(digest_of("rollouts")) is None
    assert StoreSnapshot(store, uses=False)().records.find(digest_of("rollouts"), use=False) is None


def test_a_snapshot_is_replaced_after_a_few_seconds(
    bucket: str, tmp_path: Path, make: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"s3://{bucket}/{tmp_path.name}")
    model = make(store, "model")
    recent = StoreSnapshot(store, uses=True)
    assert recent().records.find(digest_of("model")) is not None
    (entry,) = store.manifest(model).files
    store.backend.put(suspect_path(entry.sha256), b"corrupt")
    monkeypatch.setattr("alignment_core.artifacts.snapshot.SECONDS", 0.0)
    assert recent().records.find(digest_of("model")) is None
    store.backend.delete(suspect_path(entry.sha256))
    store.backend.delete(stage_path(digest_of("model")))
    assert recent().records.find(digest_of("model")) is None


def test_a_long_listing_is_replaced_by_single_requests(
    bucket: str, tmp_path: Path, make: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment_core.artifacts.snapshot._SHORT", 2)
    store = open_store(f"s3://{bucket}/{tmp_path.name}")
    for number in range(3):
        make(store, f"model-{number}")
    assert StoreSnapshot(store, uses=True)().records.find(digest_of("model-1")) is not None
    assert StoreSnapshot(store, uses=True)().records.find(digest_of("unknown")) is None
