"""Attachments: small files beside an artifact that are no part of it, in a folder and in S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, Store, collect, open_store
from alignment_core.artifacts.attachments import attach, attachment, attachments
from alignment_core.artifacts.paths import ATTACHMENTS, BLOBS, MANIFESTS
from alignment_core.errors import NotFound, StoreError


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_store(f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}")


def test_an_attachment_is_kept_and_replaced_and_changes_no_digest(store, write):
    reference = store.publish(write("one"), "model")
    manifest = store.manifest(reference)
    attach(store, reference, {"one": b"1", "two": b"2"})
    attach(store, reference, {"one": b"1"})
    attach(store, reference, {"one": b"3"})
    assert attachments(store, reference) == {"one": b"3", "two": b"2"}
    assert (attachment(store, reference, "two"), attachment(store, reference, "none")) == (b"2", None)
    assert store.manifest(reference) == manifest
    fetched = store.fetch(reference)
    assert {path.relative_to(fetched).as_posix() for path in fetched.rglob("*") if path.is_file()} == {
        file.path for file in manifest.files
    }


def test_attachments_are_deleted_only_with_their_artifact(store, write):
    kept, orphan = (
        store.publish(write("kept", {"n": "1"}), "model"),
        store.publish(write("orphan", {"n": "2"}), "model"),
    )
    store.tags.move("policy", kept, None, "good")
    for reference in (kept, orphan):
        attach(store, reference, {"signature": b"1"})
    assert collect(store, delete=True, older_than=3600).of("attachment") == []
    assert collect(store, delete=True, older_than=-1).of("attachment") == [f"{ATTACHMENTS}{orphan.digest}/signature"]
    assert (attachments(store, kept), attachments(store, orphan)) == ({"signature": b"1"}, {})


def test_attachments_left_by_a_killed_collector_are_collected_next_time(store, write):
    orphan = store.publish(write("orphan"), "model")
    attach(store, orphan, {"signature": b"1"})
    for prefix in (MANIFESTS, BLOBS):
        for entry in list(store.backend.list(prefix)):
            store.backend.delete(entry.path)
    assert len(collect(store, delete=True, older_than=-1).of("attachment")) == 1
    assert list(store.backend.list(ATTACHMENTS)) == []


def test_an_attachment_needs_an_artifact_and_a_plain_name(store, write):
    reference = store.publish(write("one"), "model")
    with pytest.raises(NotFound):
        attach(store, Reference("model", "0" * 64), {"one": b"1"})
    for name in ("../one", "a/b", "", ".hidden", "Upper"):
        with pytest.raises(StoreError, match="no name of an attachment"):
            attach(store, reference, {name: b"1"})
