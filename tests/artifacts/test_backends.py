"""The contract of a back end, the same for a folder, S3 and the Hub: conditions that hold, whole objects, one winner."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from alignment_core.artifacts import Backend, open_store
from alignment_core.artifacts.downloads import PART
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.hub import HubBackend
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.errors import EnvironmentFault, NotFound, StoreError
from tests.processes import ended, in_child
from tests.servers.s3 import S3Server

KINDS = ("folder", "s3", "hub")


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "folder":
        return FolderBackend(tmp_path / "store")
    if request.param == "hub":
        return HubBackend(f"{request.getfixturevalue('organisation')}/{tmp_path.name}")
    return S3Backend(request.getfixturevalue("bucket"), f"{tmp_path.name}/")


def test_an_object_is_created_once_and_replaced_only_from_the_version_that_was_seen(backend: Backend) -> None:
    first = backend.put("a/one", b"1")
    assert first
    assert backend.put("a/one", b"other") is None
    assert backend.read("a/one") == b"1"
    second = backend.put("a/one", b"22", replaces=first)
    assert second
    assert second != first
    assert backend.put("a/one", b"late", replaces=first) is None
    assert backend.put("a/none", b"1", replaces=first) is None
    entry = backend.stat("a/one")
    assert entry is not None
    assert (entry.path, entry.size, entry.version) == ("a/one", 2, second)
    assert [entry.path for entry in backend.list("")] == ["a/one"]


def test_reading_a_missing_object_fails_and_deleting_it_succeeds(backend: Backend, tmp_path: Path) -> None:
    assert backend.stat("none") is None
    with pytest.raises(NotFound):
        backend.read("none")
    with pytest.raises(NotFound):
        list(backend.stream("none"))
    with pytest.raises(NotFound):
        backend.download("none", tmp_path / "to")
    backend.delete("none")
    backend.put("one", b"1")
    backend.delete("one")
    backend.delete("one")
    assert backend.stat("one") is None
    assert backend.put("one", b"again")


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART + 12345])
def test_files_of_any_size_round_trip_unchanged(backend: Backend, tmp_path: Path, size: int) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    source.write_bytes(os.urandom(size))
    version = backend.put("blobs/one", source)
    assert version
    assert backend.put("blobs/one", source) is None
    entry = backend.stat("blobs/one")
    assert entry is not None
    assert (entry.size, entry.version) == (size, version)
    backend.download("blobs/one", to)
    assert to.read_bytes() == source.read_bytes() == b"".join(backend.stream("blobs/one"))
    assert list(backend.unfinished()) == []
    source.write_bytes(b"mended")
    assert backend.put("blobs/one", source, replaces=version)
    assert backend.read("blobs/one") == b"mended"


def test_a_listing_has_the_objects_below_the_prefix_in_order(backend: Backend) -> None:
    for path in ("b/2", "a/x/1", "b/1", "ab", "a/y"):
        backend.put(path, path.encode())
    assert [entry.path for entry in backend.list("a/")] == ["a/x/1", "a/y"]
    assert [entry.path for entry in backend.list("b/")] == ["b/1", "b/2"]
    assert list(backend.list("c/")) == []
    assert all(entry.size == len(entry.path) for entry in backend.list(""))


def test_time_is_the_storages_and_advances(backend: Backend) -> None:
    backend.put("one", b"1")
    entry = backend.stat("one")
    assert entry is not None
    assert -1.0 <= backend.now() - entry.modified < 60


def test_exactly_one_of_many_concurrent_writers_wins(backend: Backend) -> None:
    version = backend.put("lease", b"0")
    for step, condition in enumerate((version, None)):
        if condition is None:
            backend.delete("lease")
        start, won = threading.Barrier(8), list[int]()

        def writes(number: int, condition: str | None = condition, won: list[int] = won, start=start) -> None:
            start.wait()
            if backend.put("lease", f"writer {number}".encode(), replaces=condition):
                won.append(number)

        threads = [threading.Thread(target=writes, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1, f"step {step}"
        assert backend.read("lease") == f"writer {won[0]}".encode()


def test_no_path_leaves_the_root(backend: Backend) -> None:
    for path in ("../up", "/etc/passwd", "a//b", "a/../b", "a\\b", "a\nb"):
        for use in (backend.read, backend.stat, backend.delete):
            with pytest.raises(StoreError, match="refuses the path"):
                use(path)


def test_a_backend_survives_pickling_and_a_fork(backend: Backend) -> None:
    backend.put("one", b"1")
    other = pickle.loads(pickle.dumps(backend))
    assert (other.uri, other.read("one")) == (backend.uri, b"1")

    def child() -> None:
        assert backend.read("one") == b"1"
        assert backend.put("two", b"2")

    assert ended(in_child(child)) == 0
    assert backend.read("two") == b"2"


# ------------------------------------------------------------------ against a model


def machine(fresh: Callable[[], Backend]) -> type[RuleBasedStateMachine]:
    """Random puts, replacements, deletions and listings, against a dictionary."""
    paths, contents = st.sampled_from(["a", "b/1", "b/2", "b/c/3"]), st.binary(max_size=8)

    class Contract(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.backend, self.model, self.versions = fresh(), dict[str, bytes](), dict[str, str]()

        @rule(path=paths, content=contents)
        def create(self, path: str, content: bytes) -> None:
            version = self.backend.put(path, content)
            assert (version is not None) == (path not in self.model)
            if version is not None:
                self.model[path], self.versions[path] = content, version

        @rule(path=paths, content=contents)
        def replace(self, path: str, content: bytes) -> None:
            version = self.backend.put(path, content, replaces=self.versions.get(path, '"0"'))
            assert (version is not None) == (path in self.model)
            if version is not None:
                self.model[path], self.versions[path] = content, version

        @rule(path=paths)
        def delete(self, path: str) -> None:
            self.backend.delete(path)
            self.model.pop(path, None)
            self.versions.pop(path, None)

        @rule(path=paths, version=st.sampled_from(["its own", "another"]))
        def delete_a_version(self, path: str, version: str) -> None:
            known = self.versions.get(path, '"0"')
            self.backend.delete(path, known if version == "its own" else '"1"')
            if version == "its own":
                self.model.pop(path, None)
                self.versions.pop(path, None)

        @rule(path=paths)
        def look(self, path: str) -> None:
            entry = self.backend.stat(path)
            assert (entry.version if entry else None) == self.versions.get(path)
            if entry:
                assert self.backend.read(path) == self.model[path]

        @rule(prefix=st.sampled_from(["", "b/", "b/c/"]))
        def list(self, prefix: str) -> None:
            sizes = {entry.path: entry.size for entry in self.backend.list(prefix)}
            assert sizes == {path: len(data) for path, data in self.model.items() if path.startswith(prefix)}

    return Contract


def test_any_sequence_of_operations_behaves_as_on_a_dictionary(backend: Backend, tmp_path: Path) -> None:
    numbers = iter(range(10**6))

    def fresh() -> Backend:
        number = next(numbers)
        if isinstance(backend, S3Backend):
            return S3Backend(backend.bucket, f"{backend.prefix}{number}/")
        if isinstance(backend, HubBackend):
            return HubBackend(f"{backend.repo.name}-{number}")
        return FolderBackend(tmp_path / f"store-{number}")

    contract = machine(fresh).TestCase
    contract.settings = settings(max_examples=5 if isinstance(backend, HubBackend) else 20, stateful_step_count=25)
    contract("runTest").runTest()


# ------------------------------------------------------------------ S3 alone


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of this test's own, which may die."""
    server = S3Server(tmp_path / "server").start()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.make_bucket("mine")
    yield server
    server.end(signal.SIGKILL)


def test_acknowledged_writes_survive_the_death_of_the_server(server: S3Server, tmp_path: Path) -> None:
    backend = S3Backend("mine", "store/")
    source = tmp_path / "source"
    source.write_bytes(os.urandom(PART + 1))
    versions = {"small": backend.put("small", b"1"), "large": backend.put("large", source)}
    server.end(signal.SIGKILL)
    server.start()
    assert {path: entry.version for path in versions if (entry := backend.stat(path))} == versions


def test_a_killed_upload_continues_with_the_uploaded_parts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, backend = tmp_path / "source", S3Backend(bucket, f"{tmp_path.name}/")
    source.write_bytes(os.urandom(6 * PART))

    def upload(most: int) -> None:
        """Send so many parts, and die."""
        sent, call = [], backend.requests.client.upload_part

        def counted(**request: object) -> object:
            if len(sent) == most:
                os.kill(os.getpid(), signal.SIGKILL)
            sent.append(request["PartNumber"])
            return call(**request)

        backend.requests.client.upload_part = counted
        backend.put("large", source)
        (tmp_path / "sent").write_text(str(len(sent)))

    monkeypatch.setattr("alignment_core.artifacts.downloads._THREADS", 1)
    assert ended(in_child(lambda: upload(4))) == -signal.SIGKILL
    assert backend.stat("large") is None
    (unfinished,) = backend.unfinished()
    assert unfinished.path == "large"
    assert ended(in_child(lambda: upload(99))) == 0
    assert int((tmp_path / "sent").read_text()) == 2
    backend.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert list(backend.unfinished()) == []


def test_an_unfinished_upload_can_be_aborted(bucket: str, tmp_path: Path) -> None:
    backend = S3Backend(bucket, f"{tmp_path.name}/")
    backend.requests.client.create_multipart_upload(Bucket=bucket, Key=f"{tmp_path.name}/blobs/one")
    (unfinished,) = backend.unfinished()
    backend.drop(unfinished)
    backend.drop(unfinished)
    assert list(backend.unfinished()) == []


def test_a_lost_answer_is_recognised_by_reading(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = S3Backend(bucket, f"{tmp_path.name}/")
    make_call = type(backend.requests.client)._make_api_call
    lost = []

    def loses_the_first_answer(client: object, name: str, request: dict[str, object]) -> object:
        answer = make_call(client, name, request)
        if name in ("PutObject", "CompleteMultipartUpload") and not lost:
            lost.append(name)
            return make_call(client, name, request)  # as a client that got no answer
        return answer

    monkeypatch.setattr(type(backend.requests.client), "_make_api_call", loses_the_first_answer)
    assert backend.put("one", b"1"), "the second try found the object of the first"
    lost.clear()
    version = backend.stat("one")
    assert version is not None
    assert backend.put("one", b"2", replaces=version.version)
    lost.clear()
    (tmp_path / "large").write_bytes(os.urandom(PART + 1))
    assert backend.put("large", tmp_path / "large")
    lost.append("none")
    assert backend.put("one", b"3") is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the server does not answer"),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
    ],
)
def test_missing_buckets_and_credentials_are_reported(
    bucket: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], sentence: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("alignment_core.artifacts.s3_client.ATTEMPTS", 1)
    with pytest.raises(Exception, match=sentence) as caught:
        open_store(f"s3://{bucket}/store")
    assert type(caught.value).__module__ == "alignment_core.errors"


def test_a_bucket_that_does_not_exist_is_named(bucket: str) -> None:
    with pytest.raises(EnvironmentFault, match="no such bucket"):
        open_store("s3://never-made/store")


def test_a_store_in_s3_publishes_fetches_and_collects_as_in_a_folder(bucket: str, tmp_path: Path, home: Path) -> None:
    """Two machines that share nothing but the bucket."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(os.urandom(PART + 5))
    (source / "config.json").write_text("{}")
    mine = open_store(f"s3://{bucket}/{tmp_path.name}")
    assert mine.workspace.root.is_relative_to(home)
    reference = mine.publish(source, "model")
    mine.tags.move("policy/production", reference, None, "the first")
    shutil.rmtree(mine.workspace.root, ignore_errors=True)
    theirs = open_store(mine.uri, writes=False)
    fetched = theirs.fetch(theirs.resolve("policy/production"))
    assert (fetched / "weights").read_bytes() == (source / "weights").read_bytes()
    assert theirs.verify(reference) == []
