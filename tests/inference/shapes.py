"""Shapes of models that tests work out numbers for by hand."""

from __future__ import annotations

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 576,
    "head_dim": 64,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
}
"""SmolLM2-135M's, with weights in fp32."""
