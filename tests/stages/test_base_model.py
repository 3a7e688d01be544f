"""Where a model comes from is looked at before anything is copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from alignment_core.errors import UserError
from alignment_core.recipes import ModelConfig
from alignment_core.stages.base_model import pin_model, run


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
    context: Any = SimpleNamespace(output=output, seed=0)
    return run(context, pin_model(ModelConfig(name=str(folder), **model)))


def test_weights_that_a_folder_holds_in_two_forms_are_taken_once(tiny_model, tmp_path):
    """``transformers`` loads model.safetensors; 14 of its tensors once more under other names are no parameters."""
    both = tmp_path / "both"
    shutil.copytree(tiny_model(), both)
    shutil.copyfile(both / "model.safetensors", both / "consolidated.safetensors")
    (both / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert stored(both, tmp_path / "out") == stored(tiny_model(), tmp_path / "plain")
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("out", "plain")]
    assert names[0] == names[1]


def test_of_several_files_those_are_taken_that_the_index_names(model, tmp_path_factory):
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
