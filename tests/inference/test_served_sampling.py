"""A served model samples as its requests ask, whatever sampling parameters its generation_config.json has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment_core.data.messages import user
from alignment_core.inference.http_server import authorization, served
from alignment_core.recipes import ResourcesConfig

RESOURCES = ResourcesConfig(device="cpu", kv_cache_mib=16)
LONGEST = 7


@pytest.mark.slow
def test_greedy_answers_have_the_likeliest_tokens_and_end_at_stop_tokens_of_the_generation_config(
    tiny_model: Any, tmp_path: Path
) -> None:
    """As of Qwen2.5-Instruct, whose generation config has a repetition penalty, which vLLM also counts for the prompt."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2", tied=False, seed=3), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(user("hello"), add_generation_prompt=True, return_dict=False)
    prompt = len(ids)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for _ in range(LONGEST):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = ids[prompt:]
    stop = expected[-1]
    assert expected.index(stop) == LONGEST - 1, "the first stop token"
    assert len(set(expected)) < LONGEST - 2, "a penalty would change the tokens that repeat"
    config = {"eos_token_id": [257, stop], "repetition_penalty": 1.5, "max_new_tokens": 2, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(config))
    request = {
        "model": "policy",
        "messages": user("hello"),
        "temperature": 0,
        "max_tokens": 2 * LONGEST,
        "return_token_ids": True,
    }
    with served(str(folder), "policy", RESOURCES) as server:
        url = f"{server.url}/chat/completions"
        answer = httpx.post(url, json=request, headers=authorization(server.token), timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice["finish_reason"] == "stop"
