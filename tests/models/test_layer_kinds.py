"""The first layers of a model, up to one of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from alignment_core.models import attention
from alignment_core.models.attention import keeps_apart, use_trees
from alignment_core.models.layer_kinds import first_layers

WIDTHS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ROUTED = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def model_of(architecture: str, layers: int, **more: Any) -> Any:
    config = transformers.AutoConfig.for_model(architecture, num_hidden_layers=layers, **WIDTHS, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("architecture", "more", "first"),
    [
        ("llama", {}, 1),
        ("qwen3", {}, 1),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 6}, 6),
        ("qwen3_moe", {**ROUTED, "decoder_sparse_step": 1}, 1),
        ("qwen3_moe", {**ROUTED, "decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2]}, 4),
        ("qwen3_moe", {**ROUTED, "decoder_sparse_step": 2}, 2),
        ("smollm3", {"no_rope_layer_interval": 4}, 4),
    ],
)
def test_layers_are_counted_up_to_the_first_of_the_last_kind(
    architecture: str, more: dict[str, Any], first: int
) -> None:
    model = model_of(architecture, 12, **more)
    layers = model.model.layers
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        whole = model(ids).logits
        with first_layers(model) as count:
            assert count == first
            states = model(ids, output_hidden_states=True).hidden_states
            assert len(states) == first + 1
    assert model.model.layers is layers
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole)


def test_a_model_is_whole_again_after_an_error() -> None:
    model = model_of("llama", 3)
    with pytest.raises(KeyError), first_layers(model):
        raise KeyError
    assert len(model.model.layers) == 3


def test_a_probe_computes_a_deep_model_in_the_time_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 70B parameters, 80 layers take 245 s on a processor."""
    monkeypatch.setattr(attention, "_probed", {})
    model = model_of("llama", 40)
    calls: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    assert use_trees(model, "lm", "cpu", torch.float32, dropout=False)
    assert keeps_apart(model, "lm")
    assert set(calls) == {0}


def test_a_model_that_counts_its_layers_by_itself_is_probed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_probed", {})
    model = model_of("llama", 3)
    calls: list[int] = []
    plain = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        calls.append(len(model.model.layers))
        _ = model.model.layers[2]
        return plain(*arguments, **options)

    monkeypatch.setattr(model, "forward", forward)
    assert keeps_apart(model, "lm")
    assert calls[0] == 1
    assert set(calls[1:]) == {3}
