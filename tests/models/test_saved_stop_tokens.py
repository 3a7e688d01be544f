"""A saved model stops where its turns ended in training, with any sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from alignment_core.models.saved_stop_tokens import stop_at_turn_end
from alignment_core.models.tokenizer import byte_tokenizer

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def saved(folder: Path, template: str | None, eos: Any) -> Any:
    """A model folder without weights, whose generation config names these tokens; its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 257}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "top_p": 0.6}))
    return tokenizer


@pytest.mark.parametrize("own", [True, False], ids=["the tokenizer's template", "that of the data"])
def test_the_end_of_a_turn_is_added_to_a_base_models_eos(tmp_path: Path, own: bool) -> None:
    tokenizer = saved(tmp_path, CHATML if own else None, 257)
    stop_at_turn_end(tmp_path, None if own else CHATML)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert sorted(config.eos_token_id) == [257, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert config.top_p == 0.6


@pytest.mark.parametrize("template", [CHATML, None])
def test_a_file_that_names_all_stop_tokens_is_unchanged(tmp_path: Path, template: str | None) -> None:
    tokenizer = saved(tmp_path, template, [257, 300])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if template:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 257, 300]}))
    before = (tmp_path / "generation_config.json").read_bytes()
    stop_at_turn_end(tmp_path)
    assert (tmp_path / "generation_config.json").read_bytes() == before


@pytest.mark.parametrize("of_model", [257, None], ids=["config.json names EOS", "no file names a token"])
def test_a_generation_config_without_eos_gets_all_stop_tokens(tmp_path: Path, of_model: int | None) -> None:
    """As of phi-1.5: ``generate`` reads that file alone, and would write on behind <|im_end|>."""
    tokenizer = saved(tmp_path, CHATML, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": of_model}))
    stop_at_turn_end(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert sorted(config.eos_token_id) == [257, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert config.top_p == 0.6
