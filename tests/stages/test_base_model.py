"""Where a model comes from is looked at before anything is copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alignment_core.errors import UserError
from alignment_core.recipes import ModelConfig
from alignment_core.stages.base_model import pin_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros((64, 64), np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"bias": np.zeros(64, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
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
