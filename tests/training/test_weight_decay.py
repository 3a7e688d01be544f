"""Which parameters weight decay takes, derived by hand for each kind of model that a stage trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from alignment_core.models.adapters import add_adapters
from alignment_core.models.packed import PackedModel
from alignment_core.recipes import LoraConfig
from alignment_core.training.optimizers import parameter_groups

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
QKVO = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
BIASES = [f"model.layers.0.self_attn.{name}_proj.bias" for name in "kqv"]
NORMS = [f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")] + ["model.norm.weight"]
EMBEDDING = "model.embed_tokens.weight"


def causal(kind: str = "llama", **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, "hidden_size": 8, "intermediate_size": 16, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def scoring() -> Any:
    config = transformers.AutoConfig.for_model("qwen2", **SMALL, hidden_size=8, intermediate_size=16, num_labels=1)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def decays(model: Any) -> dict[str, float]:
    """The weight decay of each parameter that trains."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1)
    decays_found = [(names[id(parameter)], group["weight_decay"]) for group in groups for parameter in group["params"]]
    assert len(decays_found) == len(dict(decays_found)), "no parameter is in two groups"
    return dict(decays_found)


@pytest.mark.parametrize(
    ("model", "decayed", "spared"),
    [
        (causal(tie_word_embeddings=True), QKVO + MLP, [*NORMS, EMBEDDING]),
        (causal(tie_word_embeddings=False), [*QKVO, *MLP, "lm_head.weight"], [*NORMS, EMBEDDING]),
        (causal("qwen2", tie_word_embeddings=True), QKVO + MLP, [*NORMS, *BIASES, EMBEDDING]),
        (scoring(), [*QKVO, *MLP, "score.weight"], [*NORMS, *BIASES, EMBEDDING]),
    ],
    ids=["tied head", "untied head", "biases", "reward model or critic"],
)
def test_norms_biases_and_embeddings_do_not_decay(model: Any, decayed: list[str], spared: list[str]) -> None:
    expected = dict.fromkeys(decayed, 0.1) | dict.fromkeys(spared, 0.0)
    assert decays(model) == expected
    packed = PackedModel(model, "score" if hasattr(model, "score") else "lm")  # as a learner trains it
    assert decays(packed) == {f"model.{name}": decay for name, decay in expected.items()}


def test_position_embeddings_do_not_decay() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    by_name = decays(transformers.AutoModelForCausalLM.from_config(config))
    assert {name for name, decay in by_name.items() if decay} == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_biases_of_fused_experts_do_not_decay() -> None:
    model = causal("gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=4, layer_types=["full_attention"])
    assert model.model.layers[0].mlp.experts.down_proj_bias.dim() == 2
    by_name = decays(model)
    biases = [name for name in by_name if name.endswith("bias")]
    assert len(biases) == 7  # of four projections, the router and two kinds of fused weight
    assert not any(by_name[name] for name in biases)
    assert by_name["model.layers.0.mlp.experts.down_proj"] == 0.1


@pytest.mark.parametrize("train_head", [False, True])
def test_adapters_and_a_new_head_decay_and_frozen_parameters_are_in_no_group(train_head: bool) -> None:
    model = scoring() if train_head else causal()
    head = model.score if train_head else model.lm_head
    add_adapters(model, head, LoraConfig(r=2, target_modules=("q_proj",)), 1, train_head)
    adapters = {f"model.layers.0.self_attn.q_proj.lora_{matrix}.default.weight": 0.1 for matrix in "AB"}
    assert decays(model) == adapters | ({"score.weight": 0.1} if train_head else {})


def test_a_group_without_parameters_is_left_out() -> None:
    assert [group["weight_decay"] for group in parameter_groups(torch.nn.LayerNorm(4), 0.1)] == [0.0]
