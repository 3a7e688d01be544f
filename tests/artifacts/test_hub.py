"""A store on the Hub: few commits, a single winner despite lost answers, clear errors, machines that share only the store."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from alignment_core.artifacts import ProvenanceDraft, collect, open_store
from alignment_core.artifacts.downloads import PART
from alignment_core.artifacts.hub import HubBackend
from alignment_core.artifacts.hub_requests import HubRepo
from alignment_core.errors import AlignmentError, EnvironmentFault, InfrastructureError, UserError
from tests.artifacts.conftest import KEY
from tests.processes import ended, in_child
from tests.servers.hub import PAGES, READER, HubServer


@pytest.fixture
def backend(organisation: str, tmp_path: Path) -> HubBackend:
    return HubBackend(f"{organisation}/{tmp_path.name}")


@pytest.fixture
def commits(backend: HubBackend, hub_server: HubServer) -> Callable[[], int]:
    """How many commits the repo has beside the one that came with it."""
    return lambda: len(hub_server.commits("dataset", backend.repo.name)) - 1


# ------------------------------------------------------------------ commits


def test_the_repo_is_private_and_made_by_the_first_write(backend: HubBackend, hub_server: HubServer) -> None:
    api = HfApi(endpoint=hub_server.url)
    assert backend.stat("one") is None
    assert list(backend.list("")) == []
    backend.delete("one")
    assert not api.repo_exists(backend.repo.name, repo_type="dataset")
    assert backend.put("one", b"1")
    assert api.repo_info(backend.repo.name, repo_type="dataset").private


def test_concurrent_writes_of_threads_share_few_commits(backend: HubBackend, commits: Callable[[], int]) -> None:
    backend.put("first", b"0")
    start, versions = threading.Barrier(8), dict[str, str | None]()

    def writes(path: str) -> None:
        start.wait()
        versions[path] = backend.put(path, path.encode())
        if path == "d/0":
            backend.delete("first")

    threads = [threading.Thread(target=writes, args=(f"d/{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.path: entry.version for entry in backend.list("")} == versions
    assert commits() <= 5, "one, a few for the eight, and a deletion at most"


def test_writers_in_many_processes_all_get_through(backend: HubBackend) -> None:
    backend.put("first", b"0")

    def writes(number: int) -> None:
        for step in range(3):
            assert backend.put(f"{number}/{step}", b"1")

    children = [in_child(partial(writes, number)) for number in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    assert len(list(backend.list(""))) == 1 + 4 * 3


def test_a_lost_answer_is_recognised_by_reading(
    backend: HubBackend, commits: Callable[[], int], hub_server: HubServer
) -> None:
    version = backend.put("lease", b"0")
    hub_server.fail("POST .*/commit/", "lose")
    mine = backend.put("lease", b"mine", replaces=version)
    assert mine
    assert backend.put("lease", b"other", replaces=version) is None
    assert backend.read("lease") == b"mine"
    assert commits() == 2


@pytest.mark.parametrize("exists", [True, False])
def test_a_lost_answer_is_noticed_after_later_commits_of_others(
    backend: HubBackend, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    backend.put("first", b"0")
    commit, turns = HubRepo.commit, iter([1])
    api = HfApi(endpoint=hub_server.url)

    def others_follow(repo: HubRepo, lines: bytes) -> None:
        """The request reaches the Hub or not, its answer is lost, and others commit the same bytes, or delete them."""
        if not next(turns, None):
            return commit(repo, lines)
        if exists:
            commit(repo, lines)
            api.delete_file("lease", repo.name, repo_type="dataset")
        else:
            add = CommitOperationAdd("lease", b"mine")
            api.create_commit(repo.name, [add], commit_message="others", repo_type="dataset")
        raise InfrastructureError("no answer")

    monkeypatch.setattr(HubRepo, "commit", others_follow)
    assert (backend.put("lease", b"mine") is not None) == exists


def test_requests_to_a_busy_hub_are_retried_and_a_silent_hub_is_named(
    backend: HubBackend, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.put("one", b"1")
    for request, how in ((".*", "503"), ("POST .*/commit/", "500"), ("POST .*/commit/", "429")):
        hub_server.fail(request, how)
        assert backend.put(how, b"1")
    monkeypatch.setattr("alignment_core.artifacts.hub_requests.TRIES", 1)
    monkeypatch.setattr("alignment_core.artifacts.hub_commits.TRIES", 1)
    hub_server.fail("POST .*/commit/", "500")
    with pytest.raises(InfrastructureError, match="the Hub answers 500"):
        backend.put("two", b"2")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9 does not answer"):
        backend.put("two", b"2")


def test_a_listing_of_many_pages_is_whole_and_so_is_the_search_for_a_commit(backend: HubBackend) -> None:
    backend.put("first", b"0")
    first, _ = backend.repo.head()
    count = PAGES[True] + 10
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: backend.put(f"d/{number:03}", b"1"), range(count)))
    entries = list(backend.list("d/"))
    assert [entry.path for entry in entries] == [f"d/{number:03}" for number in range(count)]
    assert {entry.size for entry in entries} == {1}
    for number in range(PAGES[True] + 1):
        backend.put(f"late/{number}", b"1")
    assert "d/" in backend.repo.following(first), "more than a page of commits back"


# ------------------------------------------------------------------ large files


def test_an_interrupted_download_resumes_where_it_stopped(
    backend: HubBackend, hub_server: HubServer, tmp_path: Path
) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    source.write_bytes(os.urandom(PART + 5))
    backend.put("large", source)
    hub_server.fail("GET /lfs/", f"cut:{PART // 3}", times=4)
    backend.download("large", to)
    assert to.read_bytes() == source.read_bytes()
    hub_server.fail("GET /lfs/", f"cut:{PART // 3}", times=2)
    assert b"".join(backend.stream("large")) == source.read_bytes()


@pytest.fixture
def server(tmp_path: Path, organisation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server of this test's own, which may die."""
    server = HubServer(tmp_path / "server").start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.end(signal.SIGKILL)


def test_acknowledged_writes_survive_the_death_of_the_server(server: HubServer, tmp_path: Path) -> None:
    backend, source = HubBackend("org/store"), tmp_path / "source"
    source.write_bytes(os.urandom(PART + 1))
    versions = {"small": backend.put("small", b"1"), "large": backend.put("large", source)}
    server.end(signal.SIGKILL)
    server.start()
    assert {path: entry.version for path in versions if (entry := backend.stat(path))} == versions


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("environment", "name", "sentence"),
    [
        ({"HF_TOKEN": ""}, "org/store", "there is no token for the Hub: set HF_TOKEN"),
        ({"HF_TOKEN": "hf_wrong"}, "org/store", "the Hub does not know this token"),
        (
            {"HF_TOKEN": READER},
            "org/never-made",
            "cannot create the private dataset repo org/never-made: .*write access",
        ),
        ({}, "nobody/store", "cannot create the private dataset repo nobody/store: .*You don't have the rights"),
    ],
)
def test_missing_repositories_and_tokens_are_reported(
    organisation: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str, sentence: str
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(EnvironmentFault, match=sentence):
        open_store(f"hf://{name}")


def test_an_offline_machine_cannot_open_a_store_on_the_hub(organisation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE is set"):
        open_store(f"hf://{organisation}/store")


@pytest.mark.parametrize("name", ["store", "datasets/org/store", "org/..", ""])
def test_a_name_has_two_parts(name: str) -> None:
    with pytest.raises(UserError, match="write hf://organisation/name"):
        open_store(f"hf://{name}")


def test_a_repo_with_other_files_is_no_store(organisation: str, hub_server: HubServer, tmp_path: Path) -> None:
    name, api = f"{organisation}/{tmp_path.name}", HfApi(endpoint=hub_server.url)
    api.create_repo(name, repo_type="dataset")
    api.upload_file(path_or_fileobj=b"a,b", path_in_repo="rows.csv", repo_id=name, repo_type="dataset")
    with pytest.raises(AlignmentError, match=r"holds other files \(rows.csv\)"):
        open_store(f"hf://{name}")


# ------------------------------------------------------------------ stores


def test_machines_share_a_store_on_the_hub_and_nothing_else(
    organisation: str,
    hub_server: HubServer,
    tmp_path: Path,
    home: Path,
    commits: Callable[[], int],
    draft: Callable[..., ProvenanceDraft],
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / f"weights-{number}").write_bytes(os.urandom(1000))
    mine = open_store(f"hf://{organisation}/{tmp_path.name}")
    assert mine.workspace.root.is_relative_to(home)
    before = commits()
    reference = mine.publish(source, "model", draft())
    assert commits() - before <= 6, "a lease, the blobs (one, unless this machine is slow), the manifest, the record"
    mine.tags.move("policy/production", reference, None, "the first")
    code = (
        "import sys; from alignment_core.artifacts import open_store; store = open_store(sys.argv[1], writes=False);"
        f"reference = store.resolve('policy/production'); assert store.records.find('{KEY}').outputs['model'] == reference;"
        "assert store.verify(reference) == []; print(store.fetch(reference))"
    )
    homes = {"ALIGN_HOME": str(tmp_path / "other"), "HF_HOME": str(tmp_path / "huggingface")}
    environment = os.environ | hub_server.environment() | homes
    done = subprocess.run([sys.executable, "-c", code, mine.uri], env=environment, capture_output=True, text=True)
    fetched = Path(done.stdout.strip())
    assert fetched.is_relative_to(tmp_path / "other"), done.stderr
    assert {file.name: file.read_bytes() for file in fetched.iterdir()} == {
        file.name: file.read_bytes() for file in source.iterdir()
    }
    assert not (tmp_path / "huggingface").exists(), "nothing is written outside ALIGN_HOME"


def test_unreferenced_objects_are_collected_once_their_publisher_has_ended(
    organisation: str, tmp_path: Path, home: Path, write: Callable[..., Path]
) -> None:
    store = open_store(f"hf://{organisation}/{tmp_path.name}")
    assert ended(in_child(lambda: open_store(store.uri).publish(write("d"), "model"))) == 0
    assert len(list(store.artifacts())) == 1
    assert len(collect(store, delete=True, older_than=-1).of("blob")) == 2
    assert [entry.path for entry in store.backend.list("")] == ["format.json"]
    shutil.rmtree(store.workspace.root, ignore_errors=True)
