"""The model that a first recipe starts from: its name, tokenizer, context and size."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.checks.memory_needs import parameters
from alignment_core.checks.rows import TokenizerSource
from alignment_core.checks.shapes import model_shape, without_weights
from alignment_core.data.context import longest_sampled
from alignment_core.data.hub import commit_of
from alignment_core.errors import UserError
from alignment_core.init.rows import without_recipe_hints, written_as_path
from alignment_core.recipes import ModelConfig
from alignment_core.recipes.paths import is_address, is_written_as_path
from alignment_core.stages.base_model import BaseModelConfig, in_store, near_tags, pin_model

PRODUCTION = "policy/production"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A small instruction-tuned model that anyone may download, and that two CPU cores can train."""
DEFAULT_ON_GPUS = "Qwen/Qwen2.5-0.5B-Instruct"
"""The same for a machine with GPUs."""
DEFAULT_WITH_IMAGES = "Qwen/Qwen2-VL-2B-Instruct"
"""For rows with images; under the Apache licence, as that of Qwen2.5-VL-3B allows no commercial use."""
SCRATCH = "scratch"
"""The name that stands for a new tiny model."""


@dataclass(frozen=True)
class Model:
    """The model to start from."""

    name: str
    """As the recipe names it, or :data:`SCRATCH`."""
    why: str
    tokenizer: TokenizerSource | None = None
    """None if the model could not be inspected."""
    context: int | None = None
    """Longest sequence in tokens, if it is known."""
    parameters: int | None = None
    """Approximate number of parameters, if it is known."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """The content of config.json, if it is known."""
    problem: str | None = None
    """Why the model could not be inspected."""

    @property
    def is_scratch(self) -> bool:
        return self.name == SCRATCH

    @property
    def reads_text_alone(self) -> bool:
        """Whether it certainly reads no images."""
        return self.is_scratch or bool(self.shape and not self.shape.get("vision_config"))


@without_recipe_hints()
def choose(name: str | None, store: Store, gpus: int = 0, images: bool = False) -> Model:
    """The named model, or the default for a machine with so many GPUs, or for rows with ``images``.

    Raises UserError for a name that is neither in the store nor a folder or Hub name. A Hub that does not answer leaves a model
    with a ``problem``.
    """
    if name == SCRATCH:
        return Model(SCRATCH, "a new tiny model, to try the recipe with", TokenizerSource())
    if name is None and images:
        why = "small, open, instruction-tuned, and reads images"
        return _of_hub(DEFAULT_WITH_IMAGES, why, store)
    if name is None:
        why = f"small, open and instruction-tuned; --model {PRODUCTION} starts from the store's policy instead"
        return _of_hub(DEFAULT_ON_GPUS if gpus else DEFAULT_MODEL, why, store)
    why = "as you named it"
    name = str(ModelConfig(name=name).name)  # the address of a whole repository is its name on the Hub
    folder = Path(name).expanduser()
    if reference := in_store(store, ModelConfig(name=name), field="--model"):
        folder = store.fetch(reference)
    elif is_address(name):
        folder = without_weights(pin_model(ModelConfig(name=name)).remote)
    elif not (is_written_as_path(name) or folder.is_dir()):
        return _of_hub(name, why, store)
    elif not (folder / "config.json").is_file():
        problem = "is a folder without config.json" if folder.is_dir() else "no such folder"
        raise UserError(
            f"--model {name}: {problem}; give a Hugging Face model folder, a Hub name or a tag of the store"
        )
    else:
        name = written_as_path(name)
    try:
        shape = dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read: {error}") from None
    return Model(
        name, why, TokenizerSource(folder=str(folder)), longest_sampled(shape), parameters(shape) or None, shape
    )


def _of_hub(name: str, why: str, store: Store) -> Model:
    model = ModelConfig(name=name)
    try:
        with without_recipe_hints():
            commit = commit_of(name, None, "model", near_tags(store, model))
    except UserError as error:
        return Model(name, why, problem=f"model: {error}; or give another --model")
    shape = model_shape(BaseModelConfig(model=model, commit=commit))
    tokenizer = TokenizerSource(hub=name, commit=commit)
    return Model(name, why, tokenizer, longest_sampled(shape), parameters(shape) or None, shape)


def relative(path: str, folder: Path) -> str:
    """A path relative to the working folder as a path relative to ``folder``; absolute paths stay."""
    if Path(path).expanduser().is_absolute() or folder.resolve() == Path.cwd().resolve():
        return path
    moved = os.path.relpath(Path.cwd() / path, folder.resolve())
    return written_as_path(moved) if path.startswith(".") else moved
