"""Shared by the data tests: tokenizers with real chat templates, files, and a call from file to table."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from alignment_core.data.build import BuiltDataset, build
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from tests.servers.files import FileServer, file_server

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
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A web server over TLS, whose certificate is trusted."""
    with file_server(tmp_path) as server:
        certificate = str(tmp_path / "cert.pem")
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        # aiohttp reads the variable when it is imported, which an earlier test may have done
        trusted = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusted)
        yield server


@pytest.fixture
def built(tokenizer: Any) -> Build:
    """Build a data set from a path, or from any value of a recipe's ``data``."""

    def run(recipe: Any, kind: Any, tokenizer: Any = tokenizer, seed: int = 0, **fields: Any) -> BuiltDataset:
        value = {"sources": [str(recipe)]} if isinstance(recipe, Path) else recipe
        config = DataConfig.model_validate({**value, **fields})
        return build(config, [pin(source) for source in config.sources], tokenizer, kind, seed)

    return run
