"""No pickle in an artifact is ever read: beside loadable files it is ignored, and alone it is refused."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alignment_core.artifacts import Store
from alignment_core.cluster.device import Device
from alignment_core.data.files import read_file
from alignment_core.errors import UserError
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.inference.weights import _stored
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import check_loadable
from alignment_core.recipes import ModelConfig, ResourcesConfig
from alignment_core.stages.base_model import pin_model
from alignment_core.stages.merge import Tensors
from alignment_core.stages.merge_adapter import CONFIG, MergeAdapterConfig, _folder
from tests.conftest import TinyModel

HARMFUL = (
    *("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    *("consolidated.00.pth", "model.ckpt", "tokenizer.pkl", "vocab.pkl", "special_tokens_map.bin", "spiece.model.bin"),
)


class Harm:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def harm(tmp_path: Path) -> Iterator[Callable[[str], bytes]]:
    """The bytes of a harmful file of this name; checks at the end that they were not executed."""
    sign = tmp_path / "harmed"

    def make(name: str) -> bytes:
        buffer = io.BytesIO()
        if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
            torch.save({"weight": Harm(sign)}, buffer)
        elif name.endswith(".npy"):
            np.save(buffer, np.array([Harm(sign)], dtype=object), allow_pickle=True)
        else:
            pickle.dump(Harm(sign), buffer)
        return buffer.getvalue()

    yield make
    assert not sign.exists(), "a pickle was read"


def test_the_harmful_files_would_do_harm(harm, tmp_path):
    torch.load(io.BytesIO(harm("pytorch_model.bin")), weights_only=False)
    assert (tmp_path / "harmed").exists()
    (tmp_path / "harmed").unlink()


@pytest.fixture
def mixed(store: Store, tiny_model: TinyModel, harm, tmp_path: Path) -> Model:
    """An artifact with safetensors and, beside them, every pickle that libraries look for."""
    folder = tmp_path / "mixed"
    shutil.copytree(tiny_model(), folder)
    for name in HARMFUL:
        (folder / name).write_bytes(harm(name))
    reference = store.publish(folder, "model")
    return Model(store.fetch(reference), reference)


@pytest.fixture
def pickled(store: Store, tiny_model: TinyModel, harm, tmp_path: Path) -> Model:
    """An artifact whose weights are pickles alone."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in HARMFUL:
        (folder / name).write_bytes(harm(name))
    reference = store.publish(folder, "model")
    return Model(store.fetch(reference), reference)


def test_pickles_beside_safetensors_are_ignored(mixed):
    assert mixed.load("lm", torch.float32) is not None
    assert mixed.load("score", torch.float32, head_seed=1) is not None
    assert mixed.tokenizer()("one").input_ids
    assert dict(_stored(str(mixed.path)))


@pytest.mark.parametrize(
    "load",
    [
        lambda model: model.load("lm", torch.float32),
        lambda model: model.load("score", torch.float32, head_seed=1),
        lambda model: list(_stored(str(model.path))),
        lambda model: Tensors("model-1", model.path, ExitStack()),
        lambda model: Engine(EngineRequest(model, 64), ResourcesConfig(), Device.detect("cpu", 0)),
        lambda model: pin_model(ModelConfig(name=str(model.path))),
    ],
    ids=["policy", "reward head", "new weights of an engine", "merge", "engine", "a folder as base model"],
)
def test_pickled_weights_without_safetensors_are_refused_in_a_sentence(pickled, load):
    with pytest.raises(UserError, match=r"has no \*\.safetensors.*pickled weights"):
        load(pickled)


def test_a_folder_with_an_adapter_beside_a_model_is_refused_as_a_model(mixed, harm, store, tmp_path):
    """``transformers`` would load the model that the adapter names, and then the adapter, if need be from a pickle."""
    folder = tmp_path / "both"
    shutil.copytree(mixed.path, folder)
    folder.chmod(0o755)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "somebody/else"}))
    reference = store.publish(folder, "model")
    with pytest.raises(UserError, match="is an adapter"):
        Model(store.fetch(reference), reference).load("lm", torch.float32)


def test_an_adapter_that_is_a_pickle_alone_is_refused(harm, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / CONFIG).write_text("{}")
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(harm("adapter_model.bin"))
    context: Any = SimpleNamespace(inputs={"adapter": tmp_path / "adapter"})
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors; pickled adapters"):
        _folder(context, MergeAdapterConfig(adapter="adapter"))


def test_arrays_of_objects_are_no_rows_and_no_scores(harm, tmp_path):
    file = tmp_path / "block.npy"
    file.write_bytes(harm("block.npy"))
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(file)  # as the stages do
    for name in ("rows.npy", "rows.pkl"):
        (tmp_path / name).write_bytes(harm(name))
        with pytest.raises((UserError, KeyError)):
            list(read_file(tmp_path / name))


def test_engines_do_not_read_pickles():
    for form in ("pt", "npcache"):
        with pytest.raises(ValueError, match="reads pickles"):
            ResourcesConfig(engine_options={"load_format": form})


def test_a_folder_with_safetensors_is_loadable(tiny_model):
    assert check_loadable(tiny_model()) == tiny_model()
