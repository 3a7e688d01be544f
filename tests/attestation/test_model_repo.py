"""A repository on the Hub gets a publication in a single commit, despite deaths, lost answers and concurrent commits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from alignment_core.attestation import model_repo
from alignment_core.attestation.model_repo import Published, publish_files, repo_of
from alignment_core.errors import Conflict, EnvironmentFault, InfrastructureError, UserError
from tests.attestation.hub import use
from tests.servers.hub import READER

LARGE = b"\0" * 4096  # the Hub stores large files separately


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(LARGE)
    return file


def publish(repo: str, files: dict[str, Path | bytes], *tags: str) -> Published:
    return publish_files(repo, "model", files, tags, "a title")


def content(repo: str, revision: str = "main") -> set[str]:
    return set(HfApi().list_repo_files(repo, revision=revision)) - {".gitattributes"}


def tagged(repo: str) -> dict[str, str]:
    return {tag.name: tag.target_commit for tag in HfApi().list_repo_refs(repo).tags}


def test_a_new_repository_is_private_and_has_the_files_in_one_commit_with_its_tags(hub, repo, weights):
    done = publish(repo, {"model.safetensors": weights, "sub/config.json": b"{}"}, "sha256-one", "v1")
    assert done.new
    assert HfApi().repo_info(repo).private
    assert content(repo) == {"model.safetensors", "sub/config.json"}
    assert tagged(repo) == {"sha256-one": done.commit, "v1": done.commit}
    assert hub.commits("model", repo)[1:] == ["a title"], "the first commit is the Hub's own"


def test_the_same_again_makes_no_commit(hub, repo, weights):
    files: dict[str, Path | bytes] = {"model.safetensors": weights, "config.json": b"{}"}
    first = publish(repo, files, "one")
    again = publish(repo, files, "one")
    assert (again.new, again.commit, len(hub.commits("model", repo))) == (False, first.commit, 2)


def test_a_new_version_uploads_changed_files_and_deletes_removed_ones(hub, repo, weights, tmp_path):
    publish(repo, {"model.safetensors": weights, "config.json": b"1", "old.json": b"{}"}, "one")
    hub.fail("PUT /lfs", "400", 100)  # uploading the weights again fails
    done = publish(repo, {"model.safetensors": weights, "config.json": b"2"}, "two")
    assert content(repo) == {"model.safetensors", "config.json"}
    assert content(repo, "one") == {"model.safetensors", "config.json", "old.json"}
    assert tagged(repo)["two"] == done.commit != tagged(repo)["one"]
    assert len(hub.commits("model", repo)) == 3
    (other := tmp_path / "other").write_bytes(LARGE + b"1")
    with pytest.raises(InfrastructureError, match="Error while uploading"):
        publish(repo, {"model.safetensors": other}, "three")
    hub.fail("nothing", "400")


def test_a_concurrent_commit_is_a_conflict_and_stays(hub, repo, weights, monkeypatch):
    publish(repo, {"model.safetensors": weights}, "one")
    real = model_repo._changes

    def interrupted(*arguments):
        """Between the look and the commit, which no test could hit otherwise."""
        monkeypatch.setattr(model_repo, "_changes", real)
        changes = real(*arguments)
        HfApi().create_commit(repo, [CommitOperationAdd("theirs", b"1")], commit_message="theirs")
        return changes

    monkeypatch.setattr(model_repo, "_changes", interrupted)
    with pytest.raises(Conflict, match="another client made a commit"):
        publish(repo, {"model.safetensors": weights, "config.json": b"{}"}, "two")
    assert content(repo) == {"model.safetensors", "theirs"}
    assert "two" not in tagged(repo)


def test_concurrent_publications_of_the_same_files_make_a_single_commit_and_all_succeed(hub, repo, weights):
    publish(repo, {"model.safetensors": weights}, "one")
    files: dict[str, Path | bytes] = {"model.safetensors": weights, "config.json": b"{}"}
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: publish(repo, files, "two"), range(4)))
    assert {publication.commit for publication in done} == {tagged(repo)["two"]}
    assert len(hub.commits("model", repo)) == 3


def test_an_answer_that_is_lost_is_found_out_by_reading(hub, repo, weights):
    publish(repo, {"model.safetensors": weights}, "one")
    hub.fail("POST .*/commit/main", "lose")
    publish(repo, {"model.safetensors": weights, "config.json": b"{}"}, "two")
    assert content(repo, "two") == {"model.safetensors", "config.json"}
    assert len(hub.commits("model", repo)) == 3


def test_a_publication_that_failed_before_tagging_sets_the_tag_next_time(hub, repo, weights):
    hub.fail("POST .*/tag/", "500", 100)
    with pytest.raises(InfrastructureError):
        publish(repo, {"model.safetensors": weights}, "one")
    assert tagged(repo) == {}
    hub.fail("nothing", "500")
    done = publish(repo, {"model.safetensors": weights}, "one")
    assert (done.new, tagged(repo)) == (False, {"one": done.commit})


def test_a_tag_never_moves_to_other_files(hub, repo, weights, tmp_path):
    first = publish(repo, {"model.safetensors": weights}, "v1")
    other = tmp_path / "other"
    other.write_bytes(LARGE + b"1")
    with pytest.raises(Conflict, match="the tag v1 of"):
        publish(repo, {"model.safetensors": other}, "v1")
    assert tagged(repo) == {"v1": first.commit}


def test_a_publication_without_write_access_names_the_missing_token(hub, repo, weights, monkeypatch):
    use(hub, monkeypatch, READER)
    with pytest.raises(EnvironmentFault, match="set HF_TOKEN"):
        publish(repo, {"model.safetensors": weights})
    hub.end()
    try:
        with pytest.raises(InfrastructureError):
            publish(repo, {"model.safetensors": weights})
    finally:
        hub.start()


def test_only_an_organisation_and_a_name_are_a_repository():
    assert repo_of("hf://org/name") == "org/name"
    for wrong in ("org/name", "hf://name", "hf://org/name/more", "hf://org/name@main", "s3://org/name"):
        with pytest.raises(UserError, match="write hf://organisation/name"):
            repo_of(wrong)
