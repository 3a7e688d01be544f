"""References and manifests: valid names and contents."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from alignment_core.artifacts import FileEntry, Manifest, Reference
from alignment_core.canonical import canonical_json
from alignment_core.errors import UserError

TEXT = "model@sha256:" + "1a2b3c4d" * 8


def test_a_reference_is_its_text():
    reference = Reference.parse(TEXT)
    assert (reference.kind, str(reference), reference.short) == ("model", TEXT, "model@sha256:1a2b3c4d1a2b")
    assert {reference: 1}[Reference.parse(TEXT)] == 1
    assert Reference("dataset", "0" * 64) < reference


@pytest.mark.parametrize(
    "text", ["", "model", "model@sha256:1a2b", "Model" + TEXT[5:], TEXT.upper(), TEXT + "\n", TEXT + "0", "@" + TEXT]
)
def test_a_malformed_reference_is_refused_with_the_expected_form(text):
    with pytest.raises(UserError, match="expected kind@sha256:<64 lower-case hex digits>"):
        Reference.parse(text)


def test_a_reference_is_a_pydantic_field():
    class Task(BaseModel):
        policy: Reference
        inputs: dict[str, Reference] = {}

    task = Task.model_validate({"policy": TEXT, "inputs": {"data": Reference.parse(TEXT)}})
    assert task.policy == task.inputs["data"] == Reference.parse(TEXT)
    assert task.model_dump(mode="json") == {"policy": TEXT, "inputs": {"data": TEXT}}
    assert Task.model_validate_json(task.model_dump_json()) == task
    assert "pattern" in Task.model_json_schema()["properties"]["policy"]
    assert canonical_json(task) == canonical_json({"policy": TEXT, "inputs": {"data": TEXT}})
    with pytest.raises(ValidationError, match=r"policy\n.*'nonsense' is not a reference: expected kind@sha256"):
        Task.model_validate({"policy": "nonsense"})


entries = st.lists(
    st.builds(
        FileEntry,
        path=st.text("abc", min_size=1, max_size=4),
        size=st.integers(0, 10),
        sha256=st.sampled_from(["0" * 64, "1" * 64]),
    ),
    min_size=1,
    unique_by=lambda entry: entry.path,
)


@given(entries.flatmap(lambda files: st.tuples(st.just(files), st.permutations(files))))
def test_the_digest_does_not_depend_on_the_order_of_the_files(pair):
    first, second = (Manifest(kind="model", files=tuple(files)) for files in pair)
    assert first == second
    assert first.digest == second.digest


@given(entries, entries)
def test_different_files_have_different_digests(first, second):
    left, right = Manifest(kind="model", files=tuple(first)), Manifest(kind="model", files=tuple(second))
    assert (left.digest == right.digest) == (left == right)


def test_the_kind_is_part_of_the_digest(write):
    directory = write("d")
    assert Manifest.of_directory(directory, "model").digest != Manifest.of_directory(directory, "dataset").digest


HOSTILE = ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "", "..", "a\\b", "a\0b", "a\nb", "\udc80"]


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_could_leave_the_artifact_is_refused(path):
    with pytest.raises(ValidationError):
        FileEntry(path=path, size=0, sha256="0" * 64)


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b"), ()])
def test_conflicting_files_are_refused(paths):
    with pytest.raises(ValidationError):
        Manifest(kind="model", files=tuple(FileEntry(path=path, size=0, sha256="0" * 64) for path in paths))


def test_symbolic_links_special_files_and_empty_directories_are_refused(write, tmp_path):
    linked = write("linked")
    (linked / "link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="symbolic link"):
        Manifest.of_directory(linked, "model")
    piped = write("piped")
    os.mkfifo(piped / "pipe")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        Manifest.of_directory(piped, "model")
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no file"):
        Manifest.of_directory(tmp_path / "empty", "model")
    with pytest.raises(UserError, match="is not a directory"):
        Manifest.of_directory(tmp_path / "absent", "model")
    with pytest.raises(UserError, match="not an artifact kind"):
        Manifest.of_directory(write("good"), "../model")
