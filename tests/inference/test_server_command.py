"""What a model's server gets from us: code that comes with the model, and stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alignment_core.inference import http_server
from alignment_core.recipes import ResourcesConfig

CPU = {"device": "cpu", "kv_cache_mib": 16}


def changed(folder: Path, source: Path, file: str, **values: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))
    return folder


def command(model: Path, trust_remote_code: bool = False, **resources: Any) -> tuple[list[str], dict[str, str]]:
    config = ResourcesConfig(**{**CPU, **resources})
    return http_server.server_of(str(model), "m", "127.0.0.1", 1, config, trust_remote_code=trust_remote_code)


def test_answers_stop_at_the_token_that_ends_a_turn_of_the_chat_template_too(tiny_model: Any, tmp_path: Path) -> None:
    """As of Qwen2.5, whose template ends turns with a token that the generation_config.json of the base model lacks."""
    model = changed(tmp_path / "base", tiny_model(), "generation_config.json", eos_token_id=3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert http_server.stop_ids(str(model)) == tuple(sorted({3, tokenizer.eos_token_id, end}))


def test_a_model_whose_end_of_turn_is_unknown_is_served_all_the_same(tmp_path: Path) -> None:
    assert http_server.stop_ids(str(tmp_path)) == ()


def test_code_of_a_model_runs_only_if_it_is_trusted(tiny_model: Any) -> None:
    assert "--trust-remote-code" in command(tiny_model(), trust_remote_code=True)[0]
    assert not [word for word in command(tiny_model())[0] if "trust" in word]
