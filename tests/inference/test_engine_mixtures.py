"""New weights in a running engine that holds a mixture of experts, which vLLM repacks on the CPU only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.models.weight_transfer import WeightStream
from tests.inference.test_engine_parity import POLICY, load, parity

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MIXTURES = {
    "mixtral": transformers.MixtralConfig(**SHAPE, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_new_weights_of_a_mixture_give_their_own_log_probabilities(name: str, machines: Any, tmp_path: Path) -> None:
    tokenizer, models = byte_tokenizer(), {}
    for seed, letter in enumerate("ab"):
        config = MIXTURES[name].__class__.from_dict({**MIXTURES[name].to_dict(), "vocab_size": len(tokenizer)})
        torch.manual_seed(seed)
        models[letter] = tmp_path / letter
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(models[letter])
        tokenizer.save_pretrained(models[letter])
    with machines(1).engines(EngineRequest(Model(models["a"], POLICY["a"]), 128)) as engine:
        assert parity(engine, models, "a") < 1e-4
        for letter in "bab":
            load(engine, models, letter)
            assert parity(engine, models, letter) < 1e-4

        trained = transformers.AutoModelForCausalLM.from_pretrained(models["a"])
        engine.all(Engine.begin_update)
        for bucket in to_buckets(WeightStream(trained, rank=0, zero_stage=0).tensors(), 20_000):
            engine.all(Engine.load_bucket, bucket)
        engine.all(Engine.end_update, str(POLICY["a"]), 1)
        assert parity(engine, models, "a") < 1e-4
