"""Which model a first recipe starts from, and what is known of it: its size, its context, its tokenizer."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.checks.rows import TokenizerSource
from alignment_core.checks.shapes import model_shape
from alignment_core.data.context import longest_sampled
from alignment_core.data.hub import commit_of
from alignment_core.errors import UserError
from alignment_core.recipes import ModelConfig
from alignment_core.recipes.paths import BEGINS, is_written_as_path
from alignment_core.stages.base_model import BaseModelConfig, in_store, near_tags

PRODUCTION = "policy/production"
USUAL = "Qwen/Qwen2.5-0.5B-Instruct"
"""A small instruct model that everybody may download."""
SCRATCH = "scratch"
"""Stands for a new tiny model, with which a recipe can be tried in seconds."""
TOY = 20_000_000
"""Bytes of weights up to which a model in the store is one to try things with."""
Shape = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The model to start from."""

    name: str
    """As the recipe says it; :data:`SCRATCH` for a new one."""
    why: str
    """Why this one, in words that follow its name."""
    tokenizer: TokenizerSource | None = None
    """None where nobody could look at it."""
    context: int | None = None
    """The longest sequence that it takes."""
    parameters: int | None = None
    """How many it has, about."""
    problem: str | None = None
    """Why nobody could look at it."""

    @property
    def is_scratch(self) -> bool:
        """Whether it is a new tiny one."""
        return self.name == SCRATCH

    @property
    def size(self) -> str:
        """Its size for people."""
        if self.parameters is None:
            return "of unknown size"
        billions = self.parameters / 1e9
        return (
            f"about {billions:.1f}B parameters" if billions >= 1 else f"about {self.parameters / 1e6:.1f}M parameters"
        )


def choose(named: str | None, store: Store) -> Model:
    """The model that somebody named, or the one to start from. Raises UserError for a name that means nothing here."""
    if named == SCRATCH:
        return Model(SCRATCH, "a new tiny model, to try the recipe with", TokenizerSource())
    if named is not None:
        return _looked_at(named, "as you named it", store)
    production = store.tag(PRODUCTION)
    if production is None or production.kind != "model":
        return _looked_at(
            USUAL, f"small, open and instruction-tuned; the store has no {PRODUCTION} to start from", store
        )
    weights = sum(file.size for file in store.manifest(production).files if file.path.endswith(".safetensors"))
    if weights <= TOY:
        why = f"small, open and instruction-tuned; {PRODUCTION} of the store is a toy of {weights / 1e6:.1f} MB"
        return _looked_at(USUAL, f"{why} (--model {PRODUCTION} starts from it all the same)", store)
    return _looked_at(PRODUCTION, "what the store has in production", store)


def _looked_at(name: str, why: str, store: Store) -> Model:
    folder = Path(name).expanduser()
    known = in_store(store, ModelConfig(name=name), field="--model")
    if known is not None:
        return _of_store(name, why, store, known)
    if is_written_as_path(name) or folder.is_dir():
        return _of_folder(name, why, folder)
    try:
        commit = commit_of(name, None, "model", near_tags(store, ModelConfig(name=name)))
    except UserError as error:
        return Model(name, why, problem=f"model: {str(error).replace(f' ({BEGINS})', '')}; or give another --model")
    shape = model_shape(BaseModelConfig(model=ModelConfig(name=name), commit=commit))
    return _of_shape(name, why, TokenizerSource(hub=name, commit=commit), shape)


def _of_store(name: str, why: str, store: Store, known: Reference) -> Model:
    folder = store.fetch(known)
    return _of_shape(name, why, TokenizerSource(folder=str(folder)), _config_of(folder))


def _of_folder(name: str, why: str, folder: Path) -> Model:
    if not (folder / "config.json").is_file():
        what = "is a folder without config.json" if folder.is_dir() else "no such folder"
        raise UserError(f"--model {name}: {what}; give a Hugging Face model folder, a Hub name or a tag of the store")
    written = name if is_written_as_path(name) else f"./{name}"
    return _of_shape(written, why, TokenizerSource(folder=str(folder)), _config_of(folder))


def _config_of(folder: Path) -> Shape:
    try:
        return dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read: {error}") from None


def _of_shape(name: str, why: str, tokenizer: TokenizerSource, shape: Shape) -> Model:
    return Model(name, why, tokenizer, longest_sampled(shape), parameters(shape))


def parameters(shape: Shape) -> int | None:
    """How many parameters a decoder of this ``config.json`` has, to some percent; None if it does not say."""
    shape = shape.get("text_config") or shape
    with suppress(KeyError, TypeError, ValueError):
        width, layers = int(shape["hidden_size"]), int(shape["num_hidden_layers"])
        heads = int(shape.get("num_attention_heads") or 1)
        head = int(shape.get("head_dim") or width // heads)
        queries = heads * head
        keys = int(shape.get("num_key_value_heads") or heads) * head
        experts = int(shape.get("num_local_experts") or shape.get("num_experts") or 1)
        inner = int((shape.get("moe_intermediate_size") if experts > 1 else None) or shape["intermediate_size"])
        embeddings = int(shape["vocab_size"]) * width * (1 if shape.get("tie_word_embeddings") else 2)
        return embeddings + layers * (2 * width * queries + 2 * width * keys + 3 * width * inner * experts)
    return None


def relative(path: str, folder: Path) -> str:
    """A path that somebody wrote in the working folder, as a recipe in ``folder`` has it; absolute ones stay."""
    if Path(path).expanduser().is_absolute() or folder.resolve() == Path.cwd().resolve():
        return path
    found = os.path.relpath(Path.cwd() / path, folder.resolve())
    return found if found.startswith(".") or not path.startswith(".") else f"./{found}"
