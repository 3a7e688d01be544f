"""Where a model comes from is looked at before anything is copied."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from safetensors.numpy import save_file

from alignment_core.checks.shapes import without_weights
from alignment_core.composition import steps
from alignment_core.composition.graph import composing
from alignment_core.composition.plan import Plan
from alignment_core.data.addresses import RemoteFile, download
from alignment_core.errors import DataError, EnvironmentFault, Unavailable, UserError
from alignment_core.heartbeat import listening
from alignment_core.lineage.sources import Source, sources_of
from alignment_core.recipes import ModelConfig
from alignment_core.stages import base_model
from alignment_core.stages.base_model import BaseModelConfig, pin_model, run
from alignment_core.stages.merge_adapter import pin_adapter
from tests.servers.hub import HubServer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros((64, 64), np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"bias": np.zeros(64, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(("weight", "bias"), 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_whole_weights_are_pinned_by_their_digests(model):
    assert sorted(pin_model(ModelConfig(name=str(model))).files) == sorted(path.name for path in model.iterdir())


@pytest.mark.parametrize("trusts", [False, True])
def test_code_of_all_models_is_copied_if_the_recipe_trusts_it(store, model, trusts):
    """All of them are loaded with their code then, and an `auto_map` names it."""
    (model / "modeling_own.py").write_text("")
    with composing(Plan(store, 0, trust_remote_code=trusts)):
        judge: Any = steps.base_model("evaluation/judge-model", ModelConfig(name=str(model)))
    assert ("*.py" in base_model._patterns(judge.config.model)) == trusts
    assert ("modeling_own.py" in judge.config.files) == trusts


def test_a_file_is_read_once_for_the_plan_and_the_run_and_again_after_a_change(model, monkeypatch):
    read: list[str] = []

    def digest_of_file(path: Path) -> str:
        read.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(base_model, "digest_of_file", digest_of_file)
    config, files = ModelConfig(name=str(model)), sorted(path.name for path in model.iterdir())
    first = pin_model(config)
    assert pin_model(config) == first
    assert sorted(read) == files
    times = (model / "config.json").stat()
    time.sleep(0.02)  # the clock of files goes in steps of some milliseconds
    (model / "config.json").write_text("[]")
    os.utime(
        model / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns)
    )  # as `rsync -t` would: same size and time
    assert pin_model(config).files["config.json"] == hashlib.sha256(b"[]").hexdigest()
    assert sorted(read) == sorted([*files, "config.json"])


@pytest.mark.parametrize("size", [0, 5, 40, 2000], ids=["empty", "in the length", "in the header", "in the weights"])
def test_weights_that_are_cut_short_are_named_before_anything_is_copied(model, size):
    file = model / "model-00002-of-00002.safetensors"
    file.write_bytes((model / "model-00001-of-00002.safetensors").read_bytes()[:size])
    with pytest.raises(
        UserError, match=rf"^model: {file}: is not a complete safetensors file \(.+\); copy or download it again$"
    ):
        pin_model(ModelConfig(name=str(model)))


def stored(folder: Path, output: Path, **model: Any) -> dict[str, Any]:
    """Copy a model as the stage does; its metrics."""
    output.mkdir()
    return copied(pin_model(ModelConfig(name=str(folder), **model)), output)


def copied(config: BaseModelConfig, output: Path) -> dict[str, Any]:
    context: Any = SimpleNamespace(output=output, progress=output.with_name(f"{output.name}-progress"), seed=0)
    return run(context, config)


def test_weights_that_a_folder_holds_in_two_forms_are_taken_once(tiny_model, tmp_path):
    """``transformers`` loads model.safetensors; 14 of its tensors once more under other names are no parameters."""
    both = tmp_path / "both"
    shutil.copytree(tiny_model(), both)
    shutil.copyfile(both / "model.safetensors", both / "consolidated.safetensors")
    (both / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert stored(both, tmp_path / "out") == stored(tiny_model(), tmp_path / "plain")
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("out", "plain")]
    assert names[0] == names[1]


def test_a_copied_policy_names_no_master_weights_of_the_store_that_it_comes_from(tiny_model, tmp_path):
    trained = tmp_path / "trained"
    shutil.copytree(tiny_model(), trained)
    (trained / "masters.json").write_text('{"masters": "masters@sha256:' + 64 * "0" + '"}')
    assert stored(trained, tmp_path / "out") == stored(tiny_model(), tmp_path / "plain")
    assert "config.json" in {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "masters.json").exists()


def test_only_weight_files_named_by_the_index_are_taken(model, tmp_path_factory):
    (model / "tokenizer_config.json").write_text("{}")
    save_file({"other": np.zeros(9, np.float32)}, model / "consolidated.safetensors")
    assert stored(model, tmp_path_factory.mktemp("out") / "out") == {"parameters": 64 * 64 + 64}
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"model-00002-of-00002\.safetensors is missing, which model\.safetensors\.index"
    ):
        pin_model(ModelConfig(name=str(model)))


def test_weights_in_a_form_that_is_not_loaded_are_refused_at_once(model):
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        pin_model(ModelConfig(name=str(model)))


def test_an_index_cannot_name_files_elsewhere(model, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.safetensors"
    save_file({"other": np.zeros(9, np.float32)}, elsewhere)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": str(elsewhere)}}))
    with pytest.raises(UserError, match=r"secret\.safetensors is missing"):
        pin_model(ModelConfig(name=str(model)))


@pytest.fixture
def in_bucket(bucket: str, tiny_model: Any) -> Any:
    """A client, after the tiny model was put into the bucket below ``models/tiny``."""
    client = botocore.session.get_session().create_client("s3")
    for path in tiny_model().iterdir():
        client.put_object(Bucket=bucket, Key=f"models/tiny/{path.name}", Body=path.read_bytes())
    client.put_object(Bucket=bucket, Key="models/tiny/checkpoint-1/model.safetensors", Body=b"not of the model")
    return client


def test_model_in_a_bucket_is_that_of_the_folder(in_bucket, tiny_model, tmp_path):
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny/"))
    (tmp_path / "out").mkdir()
    assert copied(config, tmp_path / "out") == stored(tiny_model(), tmp_path / "plain")
    contents = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "plain")]
    assert contents[0] == contents[1]
    assert config.content() == pin_model(ModelConfig(name="s3://bucket/models/tiny")).content()
    versions = {source.path: source.version for source in sources_of_config(config)}
    assert versions["s3://bucket/models/tiny/config.json"] == config.remote["config.json"].version


def sources_of_config(config: BaseModelConfig) -> tuple[Source, ...]:
    record: Any = SimpleNamespace(stage="base_model", config=config.model_dump(mode="json"))
    return sources_of(record)


def test_model_in_a_bucket_that_changed_is_refused(in_bucket, tmp_path):
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny"))
    in_bucket.put_object(Bucket="bucket", Key="models/tiny/config.json", Body=b"{}")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"s3://bucket/models/tiny/config.json: is gone or has changed"):
        copied(config, tmp_path / "out")
    assert config.content() != pin_model(ModelConfig(name="s3://bucket/models/tiny")).content()


def test_missing_files_of_a_model_in_a_bucket_are_reported_at_once(in_bucket):
    with pytest.raises(UserError, match=r"^model: s3://bucket/none/: there is no such file"):
        pin_model(ModelConfig(name="s3://bucket/none"))
    in_bucket.put_object(Bucket="bucket", Key="weights/model.safetensors", Body=b"")
    with pytest.raises(UserError, match=r"^model: s3://bucket/weights has no config.json"):
        pin_model(ModelConfig(name="s3://bucket/weights"))
    for name in ("config.json", "pytorch_model.bin"):
        in_bucket.put_object(Bucket="bucket", Key=f"pickled/{name}", Body=b"{}")
    with pytest.raises(UserError, match=r"^model: s3://bucket/pickled has no \*.safetensors: pickled weights are not"):
        pin_model(ModelConfig(name="s3://bucket/pickled"))
    with pytest.raises(
        UserError, match=r"^model: https://host/model: a web server does not list the files of a folder"
    ):
        pin_model(ModelConfig(name="https://host/model"))
    with pytest.raises(UserError, match="revisions are of models on the Hub"):
        pin_model(ModelConfig(name="s3://bucket/models/tiny", revision="main"))


def test_files_that_were_complete_before_a_restart_are_not_sent_again(in_bucket, tmp_path, monkeypatch):
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny"))
    download(config.remote, tmp_path / "model")
    monkeypatch.setattr(RemoteFile, "open", None)
    download(config.remote, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {*config.remote}


def test_model_in_a_bucket_that_does_not_fit_on_the_disk_is_refused_before_anything_is_written(
    in_bucket, tiny_model, small_disk
):
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny"))
    output = small_disk / "out"
    output.mkdir()
    (small_disk / "others").write_bytes(bytes(960 << 10))  # of 1 MiB
    progress = f"{small_disk}/out-progress/model"
    with pytest.raises(
        EnvironmentFault,
        match=rf"^s3://bucket/models/tiny needs 0\.\d MiB in {progress}, which has 0\.1 MiB left: the disk is full; .+$",
    ):
        copied(config, output)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == [small_disk / "others"]
    (small_disk / "others").unlink()
    assert copied(config, output)["parameters"] > 0
    assert bytes_of(output) == bytes_of(tiny_model())


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_disk_that_fills_up_during_a_download_leaves_no_partial_file(kind, in_bucket, tiny_model, small_disk):
    """The disk has room, but too few names, which is known only when files are created."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        in_bucket.put_object(Bucket="bucket", Key=f"adapters/tiny/{name}", Body=name.encode())
    pins: dict[str, Any] = {
        "model": lambda: pin_model(ModelConfig(name="s3://bucket/models/tiny")),
        "adapter": lambda: pin_adapter("s3://bucket/adapters/tiny"),
    }
    files = pins[kind]().remote
    folder = small_disk / kind
    folder.mkdir()
    names = take_names(small_disk)
    names.pop().unlink()  # room for one file
    with pytest.raises(
        EnvironmentFault, match=rf"^cannot write {folder}/\S+\.(json|jinja|safetensors): the disk is full; free space"
    ):
        download(files, folder)
    whole = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert whole == {name: files[name].size for name in whole}, "no partial file"
    assert len(whole) < len(files)
    for path in names:
        path.unlink()
    download(files, folder)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == {
        name: file.size for name, file in files.items()
    }


def take_names(disk: Path) -> list[Path]:
    """Create empty files until the file system has no names left."""
    taken = []
    with contextlib.suppress(OSError):
        for number in range(1000):
            path = disk / f"taken-{number}"
            path.touch()
            taken.append(path)
    return taken


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_object_whose_key_leads_out_of_the_folder_is_not_written(in_bucket, tmp_path):
    for key in ("models/tiny///evil.json", "models/tiny/./config.json"):
        in_bucket.put_object(Bucket="bucket", Key=key, Body=b"{}")
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny"))
    assert [name for name in config.remote if name.startswith((".", "/"))] == []
    for name in (f"/{tmp_path}/evil.json", "../evil.json", "a/../../evil.json", ""):
        with pytest.raises(UserError, match="is no path below a folder"):
            without_weights({name: config.remote["config.json"]})
        with pytest.raises(UserError, match="is no path below a folder"):
            download({name: config.remote["config.json"]}, tmp_path / "model")
    assert not list(tmp_path.glob("**/evil.json"))


def test_file_that_is_not_whole_after_a_restart_is_sent_again(in_bucket, tiny_model, tmp_path):
    config = pin_model(ModelConfig(name="s3://bucket/models/tiny"))
    download(config.remote, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, 100)  # as a power cut may leave it
    download(config.remote, tmp_path / "model")
    assert weights.read_bytes() == (tiny_model() / "model.safetensors").read_bytes()


def test_download_is_synced_to_disk_before_the_rename(in_bucket, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.readlink(f"/proc/self/fd/{handle}")))
    file = pin_model(ModelConfig(name="s3://bucket/models/tiny")).remote["config.json"]
    download({"config.json": file}, tmp_path / "model")
    assert done == [str(tmp_path / "model" / ".config.json.partial"), str(tmp_path / "model")]


def test_answer_of_another_size_is_refused(in_bucket, tmp_path):
    file = pin_model(ModelConfig(name="s3://bucket/models/tiny")).remote["config.json"]
    sent = file.size or 0

    class OtherSize(RemoteFile):
        def check(self) -> None:
            pass

    other = OtherSize(address=file.address, version=file.version, size=sent + 1)
    with pytest.raises(Unavailable, match=f"the server sent {sent} of {sent + 1} bytes"):
        download({"config.json": other}, tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()


@pytest.fixture
def hub_server(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(tmp_path / "hub").start()
    yield server
    server.end()


def test_a_download_from_the_hub_shows_its_progress(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bars of the client are off in the run host; bytes arrive in its threads."""
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    api = HfApi(endpoint=hub_server.url, token=hub_server.environment()["HF_TOKEN"])
    name = f"org/{tmp_path.name}"
    api.create_repo(name)
    for path, data in (("config.json", b"{}"), ("model.safetensors", os.urandom(1 << 20))):
        api.upload_file(path_or_fileobj=data, path_in_repo=path, repo_id=name)
    there = functools.partial(api.snapshot_download, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", there)
    beats: list[str] = []
    with listening(lambda: beats.append(threading.current_thread().name)):
        folder = base_model._download(ModelConfig(name=name), str(api.repo_info(name).sha))
    assert (folder / "model.safetensors").stat().st_size == 1 << 20
    assert len(beats) >= 2
    assert {*beats} - {threading.current_thread().name}, "as bytes arrive"
