"""A damaged document in a store is reported in a sentence: the file, the problem and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.artifacts.paths import manifest_path, snapshot_path, stage_path, tag_path
from alignment_core.artifacts.stored_progress import files_of
from alignment_core.errors import Corrupt, one_line
from tests.align import align_here

KEY = "a" * 64
DAMAGES: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"kind": "model", "fil',
    "another document": b'{"kind": "Model", "files": [{"path": "../x", "size": -1}], "more": 1}',
    "a list": b"[]",
    "no UTF-8": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
}


@pytest.fixture
def artifact(store: Store, write: Callable[..., Path], draft: Callable[..., ProvenanceDraft]) -> Reference:
    reference = store.publish(write("model"), "model", draft(KEY))
    store.tags.move("policy", reference, None, "first")
    store.backend.put(snapshot_path(KEY), b'{"files": []}')
    return reference


def damage(store: Store, path: str, data: bytes) -> Path:
    file = Path(store.uri, path)
    file.chmod(0o644)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("document", ["manifest", "stage record", "tag move"])
def test_the_sentence_names_the_file_and_the_fix(store: Store, artifact: Reference, document: str, data: bytes) -> None:
    paths = {
        "manifest": manifest_path(artifact.digest),
        "stage record": stage_path(KEY),
        "tag move": tag_path("policy", 1),
    }
    damage(store, paths[document], data)
    reads = {
        "manifest": lambda: store.manifest(artifact),
        "stage record": lambda: store.records.read(stage_path(KEY)),
        "tag move": lambda: store.tags.get("policy"),
    }
    with pytest.raises(Corrupt) as caught:
        reads[document]()
    sentence = str(caught.value)
    assert sentence.startswith(f"{paths[document]} in {store.uri} is not a {document}: ")
    assert ("align run" if document != "tag move" else "restore the file") in sentence
    assert "\n" not in sentence
    assert "pydantic" not in sentence


def test_commands_report_a_damaged_manifest_and_publishing_again_repairs_it(
    store: Store,
    artifact: Reference,
    home: Path,
    write: Callable[..., Path],
    draft: Callable[..., ProvenanceDraft],
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(store, manifest_path(artifact.digest), DAMAGES["another document"])
    shown = align_here(home, "artifacts", "show", artifact.digest, "--store", store.uri)
    verified = align_here(home, "artifacts", "verify", str(artifact), "--store", store.uri)
    listed = align_here(home, "artifacts", "ls", "--store", store.uri)
    assert (shown.returncode, verified.returncode, listed.returncode) == (1, 1, 0)
    for output in (shown.stderr, verified.stderr, caplog.text):
        assert "is not a manifest: kind: String should match pattern" in output
        assert "errors.pydantic.dev" not in output
    assert store.records.find(KEY) is None
    assert store.publish(write("model"), "model", draft(KEY)) == artifact
    assert store.verify(artifact) == []


def test_a_damaged_snapshot_of_progress_is_reported_and_the_stage_starts_anew(
    store: Store, artifact: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    damage(store, snapshot_path(KEY), b'{"files": [{"path": 1}]}')
    assert files_of(store, snapshot_path(KEY)) == ()
    assert "the stage starts from the beginning: files.0.path: Input should be a valid string" in caplog.text
    assert "pydantic" not in caplog.text


def test_an_error_of_another_kind_is_its_text_on_one_line() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
