"""Tiny mixtures of experts whose routers add a bias to the scores by which they choose."""

from __future__ import annotations

from typing import Any

import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def tiny_deepseek() -> Any:
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return transformers.DeepseekV3Config(num_key_value_heads=2, **heads, **_SHAPE)


def tiny_glm() -> Any:
    return transformers.Glm4MoeConfig(num_key_value_heads=1, **_SHAPE)
