"""Weights in buckets: none exceeds its maximum size, and together they are the model, in any order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.models.weight_transfer import Bucket, Receiver, Sender, plan
from tests.models.mixtures import tiny_deepseek, tiny_glm


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def received(buckets: list[Bucket]) -> dict[str, torch.Tensor]:
    receiver = Receiver()
    weights = [weight for bucket in buckets for weight in receiver.add(bucket)]
    assert len(weights) == len(dict(weights)), "each comes once"
    return dict(weights)


def size_of(bucket: Bucket) -> int:
    return sum(piece.numbers.nbytes for piece in bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1_000, 10_007, 60_000, 1 << 20])
def test_no_bucket_exceeds_its_size_and_all_together_are_the_model(
    size: int, dtype: torch.dtype, tiny_model: Any
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", False), dtype=dtype)
    sender = Sender(model, rank=0, zero_stage=0)
    buckets = [sender.bucket(share) for share in plan(model, size)]
    assert max(map(size_of, buckets)) <= size + 3, "cut between two numbers"
    expected = parameters(model)
    for order in (list, reversed, lambda all_of_them: random.Random(1).sample(all_of_them, len(all_of_them))):
        weights = received(list(order(buckets)))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_incomplete_weights_are_not_received(tiny_model: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    sender, shares = Sender(model, rank=0, zero_stage=0), plan(model, 20_000)
    name = "model.embed_tokens.weight"
    last = max(number for number, share in enumerate(shares) if share.names == (name,))
    assert shares[last].parts > 2
    weights = received([sender.bucket(share) for number, share in enumerate(shares) if number != last])
    assert weights.keys() == parameters(model).keys() - {name}


def test_only_rank_0_sends_weights(tiny_model: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    sender = Sender(model, rank=1, zero_stage=0)
    assert all(not sender.bucket(share) for share in plan(model, 20_000))


def test_a_bucket_walks_through_no_other_modules(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five walks for each of a real model's buckets took a tenth of the processor time of an update."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    sender, shares = Sender(model, rank=0, zero_stage=0), plan(model, 20_000)
    monkeypatch.setattr(torch.nn.Module, "named_modules", lambda *_, **__: pytest.fail("a walk"))
    assert all(sender.bucket(share) for share in shares)


def test_the_experts_of_a_mixture_come_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    sender, shares = Sender(model, rank=0, zero_stage=0), plan(model, 500)
    assert max(share.parts for share in shares) > 3, "the experts that transformers keeps fused"
    weights = received([sender.bucket(share) for share in shares])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("config", [tiny_deepseek(), tiny_glm()], ids=lambda config: config.model_type)
def test_the_biases_of_a_router_are_sent_as_a_checkpoint_has_them(config: Any, tmp_path: Path) -> None:
    """They are buffers, and vLLM has parameters of these names (deepseek_v2.py, glm4_moe.py), which an update must bring."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.data = torch.tensor([4.013, 4.012, 4.001, 4.0])
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    sender = Sender(model, rank=0, zero_stage=0)
    weights = received([sender.bucket(spec) for spec in plan(model, 500)])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_the_embedding_of_a_real_vocabulary_fits_through_the_store_that_actors_share() -> None:
    from alignment_core.cluster.group import RELAYED
    from alignment_core.cluster.ray_cluster import OBJECT_STORE_BYTES

    with torch.device("meta"):
        config = transformers.Qwen2Config(
            vocab_size=151_936, hidden_size=896, num_hidden_layers=1, intermediate_size=64
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.get_input_embeddings().weight.nbytes == 544_538_624
    largest = max(-(-parameters(model)[share.names[0]].nbytes // share.parts) for share in plan(model))
    assert RELAYED * largest < OBJECT_STORE_BYTES
