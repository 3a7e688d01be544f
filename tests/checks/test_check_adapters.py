"""Rows are checked with the tokenizer that the merged model will have: that of the adapter, as far as it brings one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.models.saving import ADAPTER
from alignment_core.models.tokenizer import byte_tokenizer
from tests.checks.recipes import look, sft

REFUSES = "{{ raise_exception('the template refuses this row') }}"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The files of an adapter that the check reads."""
    folder = tmp_path / ADAPTER
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def problems(store: Any, rows: Path, model: Path, adapter: Path, **fields: Any) -> list[str]:
    recipe = sft(rows) | {"model": {"name": str(model), "adapter": str(adapter), **fields}}
    problems: list[str] = look(store, recipe).problems
    return problems


def test_an_adapters_own_tokenizer_renders_the_rows(store, rows, tiny_model, adapter):
    assert problems(store, rows, tiny_model(), adapter) == []
    byte_tokenizer(REFUSES).save_pretrained(adapter)
    (problem,) = problems(store, rows, tiny_model(), adapter)
    assert "the template refuses this row" in problem


def test_the_tokenizer_of_a_stored_adapter_renders_the_rows(store, rows, tiny_model, adapter):
    byte_tokenizer(REFUSES).save_pretrained(adapter)
    recipe = sft(rows) | {"model": {"name": str(tiny_model()), "adapter": str(store.publish(adapter, ADAPTER))}}
    assert "the template refuses this row" in look(store, recipe).problems[0]


def test_an_adapters_own_template_renders_the_rows(store, rows, tiny_model, adapter):
    (adapter / "chat_template.jinja").write_text(REFUSES)
    (problem,) = problems(store, rows, tiny_model(), adapter)
    assert "the template refuses this row" in problem


def test_the_recipes_template_takes_precedence_over_the_adapters(store, rows, tiny_model, adapter):
    byte_tokenizer(REFUSES).save_pretrained(adapter)
    template = byte_tokenizer().chat_template
    assert problems(store, rows, tiny_model(), adapter, chat_template=template) == []
