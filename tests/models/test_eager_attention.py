"""Models that PyTorch's ``scaled_dot_product_attention`` cannot compute: soft caps on scores, attention sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.models.loading import Head, load_model
from alignment_core.models.packed import PackedModel
from tests.models.test_attention import TINY, check_that_packed_is_alone

IDS = torch.arange(1, 40)[None]
WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2 = transformers.Gemma2Config(
    **TINY, **WINDOW, attn_logit_softcapping=1.0, query_pre_attn_scalar=8, initializer_range=0.3
)
"""Its scores have a standard deviation of about 3 before the cap of 1."""
GPT_OSS = transformers.GptOssConfig(
    **{**TINY, "max_position_embeddings": 131_072},
    **WINDOW,
    num_local_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
)


def saved(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return str(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def plain(folder: str, attention: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def test_a_soft_cap_of_attention_is_applied(tmp_path: Path) -> None:
    """The right values are those of ``transformers`` with its eager attention, the only one that applies it."""
    folder = saved(GEMMA2, tmp_path)
    capped = logits(plain(folder, "eager"))
    assert (logits(plain(folder, "sdpa")) - capped).abs().max() > 0.1, "or this test would show nothing"
    torch.testing.assert_close(logits(load_model(folder, "lm", torch.float32)), capped)


@pytest.mark.parametrize("head", ["score", "value"])
def test_so_it_is_in_a_reward_model_and_a_critic(head: Head, tmp_path: Path) -> None:
    folder = saved(GEMMA2, tmp_path)
    model = load_model(folder, head, torch.float32, head_seed=0)
    right = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states, expected = (part(IDS).last_hidden_state for part in (model.base_model, right))
    torch.testing.assert_close(states, expected)


def test_a_gemma_2_without_a_soft_cap_keeps_its_attention(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**TINY, attn_logit_softcapping=None)
    assert load_model(saved(config, tmp_path), "lm", torch.float32).config._attn_implementation == "sdpa"


def test_packed_rows_of_a_model_with_soft_caps_are_separate_ones(tmp_path: Path) -> None:
    model = load_model(saved(GEMMA2, tmp_path), "lm", torch.float32)
    assert not PackedModel(model, "lm").one_sequence_per_line
    check_that_packed_is_alone(model, share_prefixes=False)


def test_a_model_with_attention_sinks_has_each_row_in_a_line_of_its_own(tmp_path: Path) -> None:
    """gpt-oss, of which ``transformers`` makes masks without position ids."""
    folder = saved(GPT_OSS, tmp_path, torch.bfloat16)
    assert load_model(folder, "lm", torch.bfloat16).dtype == torch.bfloat16
    model = load_model(folder, "lm", torch.float32)
    torch.testing.assert_close(logits(model), logits(plain(folder, "eager")))
    assert PackedModel(model, "lm").one_sequence_per_line
    check_that_packed_is_alone(model, share_prefixes=False)
