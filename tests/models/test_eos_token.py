"""`model.eos_token`: what TRL 1.16 sets (`SFTConfig.eos_token`), in the files of the stored model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.errors import UserError
from alignment_core.recipes import ModelConfig
from alignment_core.stages import base_model, merge_adapter

Stored = Callable[..., Path]
NEW = "<unused0>"
"""A token that a byte-level model has and does not use."""


@pytest.fixture
def stored(tiny_model: Callable[..., Path], tmp_path: Path) -> Stored:
    def store(change: Callable[[Path], None] = lambda source: None, **fields: Any) -> Path:
        source, output = tmp_path / "source", tmp_path / "output"
        shutil.copytree(tiny_model(), source)
        change(source)
        output.mkdir()
        context: Any = SimpleNamespace(output=output, progress=tmp_path, seed=0)
        base_model.run(context, base_model.pin_model(ModelConfig(name=str(source), **fields)))
        return output

    return store


def test_the_token_ends_sequences_of_the_stored_model(stored: Stored) -> None:
    folder = stored(eos_token=NEW)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    new, old = tokenizer.convert_tokens_to_ids([NEW, "<eos>"])
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (NEW, new)
    assert AutoConfig.from_pretrained(folder).eos_token_id == new
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [new, old], "as TRL adds it to those that there are"
    assert Renderer(tokenizer, eos_token_ids=eos_token_ids(folder)).turn_end.stop_ids == tuple(sorted((new, old)))


def test_answers_end_with_it_where_the_template_ends_no_turn(stored: Stored) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(stored(eos_token=NEW, chat_template=template))
    assert Renderer(tokenizer).answered("a", "b").ids == [ord("b"), tokenizer.convert_tokens_to_ids(NEW)]


def test_a_template_that_names_eos_shows_it(stored: Stored) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stored(eos_token=NEW))
    assert (
        tokenizer.apply_chat_template([{"role": "assistant", "content": "b"}], tokenize=False) == f"<assistant>b{NEW}"
    )


def test_a_model_without_a_generation_config_keeps_the_earlier_end(stored: Stored) -> None:
    def without(source: Path) -> None:
        (source / "generation_config.json").unlink()
        (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))

    folder = stored(without, eos_token=NEW)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == NEW
    assert eos_token_ids(folder) == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<eos>"))


def test_a_text_that_is_no_token_is_refused(stored: Stored) -> None:
    with pytest.raises(UserError, match=r"model\.eos_token: the tokenizer's vocabulary has no token '<\|end\|>'"):
        stored(eos_token="<|end|>")


def test_models_without_it_have_the_keys_of_earlier_versions() -> None:
    assert "eos_token" not in ModelConfig(name="./model").model_dump()
    assert "eos_token" not in str(merge_adapter.MergeAdapterConfig(adapter="./a").content())
    assert merge_adapter.MergeAdapterConfig(adapter="./a", eos_token=NEW).content()["eos_token"] == NEW
