"""The tests' Hub answers the unmodified ``huggingface_hub`` client as the Hub does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.servers.hub import PAGES, PART, READER, HubServer


@pytest.fixture
def api(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return HfApi(endpoint=hub_server.url, token=hub_server.environment()["HF_TOKEN"])


@pytest.fixture(params=["model", "dataset"])
def repo(request: pytest.FixtureRequest, api: HfApi, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Kind and name of a private repo."""
    name = f"org/{tmp_path.name}"
    api.create_repo(name, repo_type=request.param, private=True)
    yield request.param, name
    api.delete_repo(name, repo_type=request.param)


def test_files_are_read_at_their_revision(api: HfApi, repo: tuple[str, str], tmp_path: Path) -> None:
    kind, name = repo
    small, large = b"small text", os.urandom(2 * PART + 3)
    for path, data in (("a/small.txt", small), ("large.bin", large)):
        api.upload_file(path_or_fileobj=data, path_in_repo=path, repo_id=name, repo_type=kind)
    api.create_tag(name, tag="v1", repo_type=kind)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(name, tag="v1", repo_type=kind)
    later = api.upload_file(path_or_fileobj=b"later", path_in_repo="a/small.txt", repo_id=name, repo_type=kind)
    for revision, text in (("v1", small), ("main", b"later"), (later.oid, b"later")):
        folder = Path(api.snapshot_download(name, repo_type=kind, revision=revision, cache_dir=tmp_path / "cache"))
        assert (folder / "a/small.txt").read_bytes() == text
        assert (folder / "large.bin").read_bytes() == large
    assert [tag.name for tag in api.list_repo_refs(name, repo_type=kind).tags] == ["v1"]
    api.delete_tag(name, tag="v1", repo_type=kind)
    assert api.list_repo_refs(name, repo_type=kind).tags == []
    titles = [commit.title for commit in api.list_repo_commits(name, repo_type=kind)]
    assert titles[-1] == "initial commit"
    assert len(titles) == 4


def test_a_commit_holds_its_parent_as_a_condition(api: HfApi, repo: tuple[str, str]) -> None:
    kind, name = repo
    first = api.repo_info(name, repo_type=kind).sha
    adds = [CommitOperationAdd(path, path.encode()) for path in ("a/1", "a/2", "b")]
    second = api.create_commit(name, adds, commit_message="second", repo_type=kind, parent_commit=first)
    deletes = [CommitOperationDelete("a/"), CommitOperationDelete("b")]
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(name, deletes, commit_message="stale", repo_type=kind, parent_commit=first)
    assert api.file_exists(name, "b", repo_type=kind)
    api.create_commit(name, deletes, commit_message="third", repo_type=kind, parent_commit=second.oid)
    assert api.list_repo_files(name, repo_type=kind) == [".gitattributes"]


def test_a_listing_comes_in_pages_with_the_last_commits(api: HfApi, repo: tuple[str, str]) -> None:
    kind, name = repo
    count = PAGES[True] + 1
    adds = [CommitOperationAdd(f"d/{number:03}", b"1") for number in range(count)]
    api.create_commit(name, adds, commit_message="many", repo_type=kind)
    entries = list(api.list_repo_tree(name, "d", recursive=True, expand=True, repo_type=kind))
    assert [entry.path for entry in entries] == [f"d/{number:03}" for number in range(count)]
    assert {entry.last_commit.title for entry in entries if entry.last_commit} == {"many"}
    (info,) = api.get_paths_info(name, ["d/000", "none"], expand=True, repo_type=kind)
    assert info.last_commit is not None
    assert info.last_commit.title == "many"
    (folder,) = [entry for entry in api.list_repo_tree(name, repo_type=kind) if entry.path != ".gitattributes"]
    assert folder.path == "d"


def test_missing_objects_and_missing_permissions_have_different_errors(
    api: HfApi, repo: tuple[str, str], hub_server: HubServer
) -> None:
    kind, name = repo
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("org/none", repo_type=kind)
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(name, revision="none", repo_type=kind)
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(name, "none", repo_type=kind)
    assert not HfApi(endpoint=hub_server.url, token=False).repo_exists(name, repo_type=kind)
    reader = HfApi(endpoint=hub_server.url, token=READER)
    assert reader.whoami()["name"] == "reader"
    assert reader.repo_exists(name, repo_type=kind)
    with pytest.raises(HfHubHTTPError, match="403"):
        reader.upload_file(path_or_fileobj=b"1", path_in_repo="one", repo_id=name, repo_type=kind)
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub_server.url, token="hf_wrong").whoami()
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(name, repo_type=kind)
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("nobody/none", repo_type=kind)


def test_transformers_loads_a_model_at_a_tag(
    api: HfApi, hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig  # takes seconds to import

    name = f"org/{tmp_path.name}"
    api.create_repo(name, private=True)
    config = b'{"model_type": "gpt2", "n_embd": 48}'
    api.upload_file(path_or_fileobj=config, path_in_repo="config.json", repo_id=name)
    api.create_tag(name, tag="v1")
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=name)
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)  # as HF_ENDPOINT does when the client is imported
    template = f"{hub_server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    loaded = AutoConfig.from_pretrained(name, revision="v1", token=api.token, cache_dir=tmp_path / "cache")
    assert loaded.n_embd == 48
