"""Paths that travel: to a process of this machine as they are, to another machine as the same place there."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.artifacts.portable_paths import carried, home_id, placed, receive, send, share
from alignment_core.models.model_ref import Model
from alignment_core.recipes import GenerationConfig
from alignment_core.rewards.scoring_actors import pairs_of
from alignment_core.rollout.images import with_paths
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.rollout import to_batch
from tests.rollout.rollouts import rollout

Elsewhere = Callable[[str, object], Any]


@pytest.fixture
def shared(home: Path, bucket: str, tmp_path: Path) -> Store:
    return open_store(f"s3://{bucket}/{tmp_path.name}")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    """``elsewhere("code", value)``: the code's ``result`` for the value ``given``, on a machine with another ALIGN_HOME."""

    def run(code: str, given: object) -> object:
        script = (
            f"import pickle, sys\ngiven = pickle.load(sys.stdin.buffer)\n{code}\npickle.dump(result, sys.stdout.buffer)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=pickle.dumps(given),
            env=os.environ | {"ALIGN_HOME": str(tmp_path / "other")},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return pickle.loads(done.stdout)

    return run


@pytest.fixture
def artifact(shared: Store, tmp_path: Path) -> Reference:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "train.parquet").write_bytes(b"rows")
    return shared.publish(folder, "dataset")


def test_an_unpickled_path_fetches_its_artifact_into_the_local_cache(
    shared: Store, artifact: Reference, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    path = placed(shared, shared.fetch(artifact))
    assert pickle.loads(pickle.dumps(path)) == path
    code = "result = str(given[0].path), given[1].read_bytes()"
    folder, content = elsewhere(code, (Model(path, artifact), path / "train.parquet"))
    assert content == b"rows"
    assert Path(folder).is_relative_to(tmp_path / "other" / "stores")


def test_images_of_prompts_are_fetched_where_they_are_sampled_scored_and_trained(
    shared: Store, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    digest = "a" * 64
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data" / "images" / digest).write_bytes(b"pixels")
    data = placed(shared, shared.fetch(shared.publish(tmp_path / "data", "dataset")))
    rows = with_paths([{"prompt_ids": [1, 2], "images": [digest]}], data)
    config = GenerationConfig(num_generations=1, max_completion_length=4)
    schedule = PromptSchedule(rows, config, seed=0, shuffle=False)
    request = schedule.request(schedule.episodes(0)[0])
    completion = rollout([True], images=request.images)
    code = """
from pathlib import Path
request, batch, pairs = given
images = [*request.images, *batch.rows()[0].sequences[0].images, *pairs[0][-1]]
result = [Path(image).read_bytes() for image in images], str(images[0])"""
    contents, path = elsewhere(code, (request, to_batch([completion]), pairs_of([completion.row()])))
    assert contents == [b"pixels"] * 3
    assert Path(path).is_relative_to(tmp_path / "other" / "stores")


def test_a_carried_file_arrives_with_its_path(
    shared: Store, store: Store, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """As images of observations do, which are in no artifact. Where machines share the store's folder, nothing is sent."""
    for each in (shared, store):
        folder = placed(each, each.workspace.progress("c" * 64)) / "observed"
        folder.mkdir()
        image = carried(folder / ("a" * 64))
        image.write_bytes(b"pixels")
        assert (b"pixels" in pickle.dumps(image)) is (each is shared)
        content, path = elsewhere("result = given.read_bytes(), str(given)", image)
        assert content == b"pixels"
        assert Path(path).is_relative_to(tmp_path / "other" / "stores") is (each is shared)
    assert carried(tmp_path) is tmp_path


def test_files_written_elsewhere_return_through_the_store_and_leave_nothing_behind(
    shared: Store, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    with shared.workspace.scratch() as scratch:
        folder = placed(shared, scratch / "model")
        code = """
from alignment_core.artifacts.portable_paths import send
folder, home = given
(folder / "inner").mkdir(parents=True)
(folder / "inner" / "weights").write_bytes(b"w" * 1000)
result = send(folder, home)"""
        entries = elsewhere(code, (folder, home_id()))
        receive(folder, entries)
        assert (folder / "inner" / "weights").read_bytes() == b"w" * 1000
    assert [path for path in (tmp_path / "other").rglob("*") if "scratch" in path.name] == []


def test_a_folder_of_this_machine_is_given_to_others(shared: Store, elsewhere: Elsewhere) -> None:
    folder = placed(shared, shared.workspace.progress("c" * 64)) / "step-1"
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"state")
    code = """
from alignment_core.artifacts.portable_paths import receive
folder, entries, home = given
receive(folder, entries, home=home)
result = (folder / "state.pt").read_bytes(), folder.parent.stat().st_mode & 0o777"""
    assert elsewhere(code, (folder, share(folder), home_id())) == (b"state", 0o700)
    assert (folder / "state.pt").is_file()


def test_within_a_machine_and_over_a_shared_folder_nothing_is_sent(
    store: Store, tmp_path: Path, elsewhere: Elsewhere
) -> None:
    folder = placed(store, tmp_path / "store" / "tmp" / "made")
    assert send(folder, home_id()) is None
    folder.mkdir(parents=True)
    assert elsewhere("result = str(given)", folder) == str(folder)
    code = "from alignment_core.artifacts.portable_paths import send\nresult = send(given, 'another machine')"
    assert elsewhere(code, folder) is None
    assert folder.is_dir()


def test_a_folder_that_the_other_machine_does_not_share_is_named(
    home: Path, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    store, folder = open_store(tmp_path / "store"), tmp_path / "made"
    folder.mkdir()
    (folder / "train.parquet").write_bytes(b"rows")
    path = placed(store, store.fetch(store.publish(folder, "dataset")))
    sent = pickle.dumps(path)
    (tmp_path / "store").rename(tmp_path / "hidden")
    code = """
from alignment_core.errors import EnvironmentFault
try:
    pickle.loads(given)
except EnvironmentFault as error:
    result = str(error)"""
    assert f"{tmp_path / 'store'} of this run is a folder of another node" in elsewhere(code, sent)
