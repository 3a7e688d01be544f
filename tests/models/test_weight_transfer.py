"""The weights of a model for engines: under the names of a checkpoint, read in groups of a limited size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.models.weight_transfer import WeightStream, groups_of
from tests.models.mixtures import tiny_deepseek, tiny_glm


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def check_equal(weights: list[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    assert len(weights) == len(expected), "each comes once"
    assert dict(weights).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1_000, 10_007, 60_000, 1 << 20])
def test_no_group_exceeds_its_size_and_all_together_are_the_model(
    size: int, dtype: torch.dtype, tiny_model: Any
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", False), dtype=dtype)
    expected = parameters(model)
    groups = groups_of(model, size)
    assert all(len(names) == 1 or sum(expected[name].nbytes for name in names) <= size for names in groups)
    check_equal(list(WeightStream(model, rank=0, zero_stage=0, size=size).tensors()), expected)


def test_only_rank_0_sends_weights(tiny_model: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    assert list(WeightStream(model, rank=1, zero_stage=0).tensors()) == []


def test_an_update_walks_through_no_other_modules(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five walks for each group of a real model's weights took a tenth of the processor time of an update."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    stream = WeightStream(model, rank=0, zero_stage=0, size=20_000)
    monkeypatch.setattr(torch.nn.Module, "named_modules", lambda *_, **__: pytest.fail("a walk"))
    assert list(stream.tensors())


def test_the_experts_of_a_mixture_come_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = list(WeightStream(model, rank=0, zero_stage=0, size=500).tensors())
    check_equal(weights, load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("config", [tiny_deepseek(), tiny_glm()], ids=lambda config: config.model_type)
def test_the_biases_of_a_router_are_sent_as_a_checkpoint_has_them(config: Any, tmp_path: Path) -> None:
    """They are buffers, and vLLM has parameters of these names (deepseek_v2.py, glm4_moe.py), which an update must bring."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.data = torch.tensor([4.013, 4.012, 4.001, 4.0])
    model.save_pretrained(tmp_path)
    weights = list(WeightStream(model, rank=0, zero_stage=0, size=500).tensors())
    check_equal(weights, load_file(tmp_path / "model.safetensors"))
    assert dict(weights)["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
