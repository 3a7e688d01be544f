"""Shared by the data tests: tokenizers with real chat templates, files, and a call from file to table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import BuiltDataset, build
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    def write(rows: Iterable[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def built(tokenizer: Any) -> Build:
    """Build a data set from a path, or from any value of a recipe's ``data``."""

    def run(recipe: Any, kind: Any, tokenizer: Any = tokenizer, seed: int = 0, **fields: Any) -> BuiltDataset:
        value = {"sources": [str(recipe)]} if isinstance(recipe, Path) else recipe
        config = DataConfig.model_validate({**value, **fields})
        return build(config, [pin(source) for source in config.sources], tokenizer, kind, seed)

    return run
