"""Base models in the form of public ones, and exports of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.models.loading import Head, load_model
from alignment_core.models.model_ref import Model
from alignment_core.recipes import TrainingConfig
from alignment_core.training.learner import Learner, ModelSource

TEXTS = ["short", "a somewhat longer one", "?" * 90, "two", "x" * 200]
Base = Callable[..., Path]


def handle(folder: Path) -> Model:
    return Model(folder, Reference(kind="model", digest="a" * 64))


def perturb(model: Any, seed: int) -> Any:
    """Change all weights, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def export(base: Path, folder: Path, head: Head = "lm", seed: int = 3, chat_template: str | None = None) -> Any:
    """Save a trained model of ``base`` in ``folder`` as a training stage does, on data with this template; returns the
    model."""
    model = perturb(load_model(str(base), head, torch.float32, head_seed=4), seed)
    learner(base, model, head, chat_template)._write(model.state_dict(), {}, folder, None)
    return model


def learner(base: Path, model: Any, head: Head = "lm", chat_template: str | None = None) -> Any:
    """A learner that can only save a model of ``base``, which needs no DeepSpeed."""
    learner: Any = Learner.__new__(Learner)
    learner.packed = SimpleNamespace(model=model)
    learner.source = ModelSource(handle(base), head, chat_template=chat_template)
    learner.steps = 0
    learner.rank = 0
    learner.training = TrainingConfig(learning_rate=1e-4, batch_size=8)
    return learner


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(ids).logits
    return output


def edit(file: Path, **changes: Any) -> None:
    """Set entries of a JSON file; None takes one out."""
    content = {**(json.loads(file.read_text()) if file.is_file() else {}), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.fixture
def base(tiny_model: Any, tmp_path: Path) -> Base:
    """A copy of a tiny model; ``tokenizer`` sets attributes of its tokenizer, such as the padding token."""

    def make(tied: bool = True, architecture: str = "llama", **tokenizer: Any) -> Path:
        folder = tmp_path / "base"
        shutil.copytree(tiny_model(architecture, tied), folder)
        if tokenizer:
            changed = transformers.AutoTokenizer.from_pretrained(folder)
            for name, value in tokenizer.items():
                setattr(changed, name, value)
            changed.save_pretrained(folder)
        return folder

    return make
