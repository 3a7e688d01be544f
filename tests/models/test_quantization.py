"""Weights in 4 and 8 bits: their values, equal on every path, and refused models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.errors import UserError
from alignment_core.models import quantization
from alignment_core.models.adapters import adapters_off, add_adapters, merged, plain_name, plain_names
from alignment_core.models.int8_linear import Int8Linear
from alignment_core.models.loading import Head
from alignment_core.models.model_ref import Model
from alignment_core.models.quantization import Bits
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import LoraConfig, TrainingConfig
from alignment_core.stages.reference_logps import ReferenceLogpsConfig

IDS = torch.arange(40)[None]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0]
"""Dettmers et al. 2023, appendix E."""


each_precision = pytest.mark.parametrize("bits", [4, 8])


def load(path: Path, head: Head = "lm", bits: Bits | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return Model(path, Reference(kind="model", digest="a" * 64), bits=bits).load(head, dtype, 5)


def lora(bits: Bits, **config: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 4, f"load_in_{bits}bit": True, **config})


def adapted(model: Any, head: Any, bits: Bits, **config: Any) -> Any:
    add_adapters(model, head, lora(bits, **config), 7, train_head=False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_each_weight_is_the_nearest_of_sixteen_times_the_largest_of_its_block(tiny_model: Any) -> None:
    plain, small = load(tiny_model()), load(tiny_model(), bits=4)
    weight = plain.model.layers[0].mlp.up_proj.weight.data
    restored = quantization.plain_weight(small.model.layers[0].mlp.up_proj)
    blocks = weight.flatten().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = torch.tensor(NF4)[(blocks[..., None] / scales[..., None] - torch.tensor(NF4)).abs().argmin(-1)]
    expected = (nearest * scales).view(weight.shape)
    assert (restored - expected).abs().max() < 0.02 * weight.abs().max(), "the scales themselves are in 8 bits"
    assert not torch.equal(restored, weight)
    stored = sum(
        parameter.numel() * parameter.element_size()
        for parameter in small.parameters()
        if hasattr(parameter, "quant_state")
    )
    assert stored * 8 == sum(
        4 * quantization.size(parameter) for parameter in small.parameters() if hasattr(parameter, "quant_state")
    )


def test_each_row_in_8_bits_is_the_nearest_of_255_multiples_of_its_scale(tiny_model: Any) -> None:
    """Dettmers et al. 2022, section 2.1: row-wise absolute maximum, of weights in half precision."""
    plain, small = load(tiny_model()), load(tiny_model(), bits=8)
    weight = plain.model.layers[0].mlp.up_proj.weight.data.half().float()
    layer = small.model.layers[0].mlp.up_proj
    step = weight.abs().amax(1, keepdim=True) / 127
    restored = quantization.plain_weight(layer)
    assert ((restored - weight).abs() <= step / 2 * (1 + 1e-5)).all()
    torch.testing.assert_close((restored / step).round() * step, restored)
    assert (layer.weight.dtype, layer.weight.nbytes) == (torch.int8, weight.numel())


@pytest.mark.parametrize(("bits", "size"), [(4, 2.5e-4), (8, 1e-4)])
def test_rounding_a_second_time_loses_small_changes(bits: Bits, size: float) -> None:
    """By hand, for normal weights with the deviation 0.025: half a step in 4 bits is 0.04 of the largest of 64, which is about
    0.06, or more; in 8 bits it is 1/254 of the largest of 1,024, about 0.085: 0.0024 and 0.0003. Weights that are rounded
    already go back where they were after a smaller change. Of those between two values some move by a whole step, so that
    the change is kept on average."""
    generator = torch.Generator().manual_seed(3)
    layer, head = torch.nn.Linear(1024, 256, bias=False), torch.nn.Linear(256, 2)
    model = torch.nn.Sequential(layer, head)

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        layer.weight.data.copy_(weights)
        quantization.round_weights(model, head, torch.float32, bits)
        return layer.weight.data.clone()

    normal = 0.025 * torch.randn(256, 1024, generator=generator)
    change = size * torch.randn(256, 1024, generator=generator)

    def kept(weights: torch.Tensor) -> float:
        return float(((rounded(weights + change) - rounded(weights)) * change).sum() / change.square().sum())

    assert abs(kept(rounded(normal))) < 0.1
    assert kept(normal) == pytest.approx(1, abs=0.1)


def test_weights_in_8_bits_are_those_of_transformers(tiny_model: Any) -> None:
    path = tiny_model("qwen2")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    public = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
    small = load(path, bits=8)
    layers = {name: layer for name, layer in small.named_modules() if quantization.is_quantised(layer)}
    assert len(layers) == 14, "7 in each of 2 blocks"
    for name, layer in layers.items():
        theirs = public.get_submodule(name).weight
        assert torch.equal(layer.weight.data, theirs.data)
        assert torch.equal(layer.weight.SCB, theirs.SCB)
    logits = small(IDS).logits
    torch.testing.assert_close(public.train()(IDS).logits, logits)
    rounds_inputs = public.eval()(IDS).logits
    assert 1e-4 < float((rounds_inputs - logits).norm() / logits.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_in_8_bits_has_the_gradient_of_its_plain_weights_and_keeps_none_of_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 8), (6,), (2, 3, 8)))
    weight[4] = 0
    layer = Int8Linear(weight, torch.nn.Parameter(bias)).to(dtype)
    assert layer.weight.SCB.dtype == torch.float32, "scales keep their precision"
    plain = quantization.plain_weight(layer)
    assert plain.dtype == dtype
    assert not plain[4].any(), "a row of zeros has the scale 0"
    kept: list[torch.Tensor] = []
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        product = layer(ours)
    assert {(tensor.dtype, tensor.shape) for tensor in kept} == {(torch.int8, (6, 8)), (torch.float32, (6,))}
    expected = torch.nn.functional.linear(theirs, plain, bias)
    torch.testing.assert_close(product, expected)
    for result in (product, expected):
        result.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@each_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_paths_compute_with_the_same_numbers(dtype: torch.dtype, bits: Bits, tiny_model: Any) -> None:
    rounded, small = load(tiny_model(), dtype=dtype), load(tiny_model(), bits=bits, dtype=dtype)
    quantization.round_weights(rounded, rounded.lm_head, dtype, bits)
    expected = rounded(IDS).logits.detach()
    torch.testing.assert_close(small.train()(IDS).logits, expected)
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(IDS).logits, expected)
        torch.testing.assert_close(small(IDS).logits, expected, msg="looking does not change them")
    assert float((load(tiny_model(), dtype=dtype)(IDS).logits - expected).abs().max()) > 1e-3


@each_precision
@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"target_modules": ("q_proj",)}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_merged_weights_equal_the_trained_model(name: str, config: dict[str, Any], bits: Bits, tiny_model: Any) -> None:
    path = tiny_model(name)
    small = load(path, bits=bits)
    adapted(small, small.lm_head, bits, **config)
    whole = load(path)
    weights = merged(small, small.state_dict())
    assert weights.keys() == whole.state_dict().keys(), "no scales among them"
    whole.load_state_dict(weights)
    torch.testing.assert_close(whole(IDS).logits, small(IDS).logits, atol=1e-5, rtol=1e-5)
    with adapters_off(small):
        torch.testing.assert_close(small(IDS).logits, load(path, bits=bits)(IDS).logits)


@each_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_engines_get_plain_weights_and_groups_count_their_bytes(
    dtype: torch.dtype, bits: Bits, tiny_model: Any
) -> None:
    small = load(tiny_model(), bits=bits, dtype=dtype)
    adapted(small, small.lm_head, bits)
    expected, most = merged(small, small.state_dict()), 1 << 14
    assert {quantization.item_bytes(small, name) for name in plain_names(small)} == {dtype.itemsize}
    stream = WeightStream(small, 0, 0, most)
    sizes = {name: tensor.nbytes for name, tensor in expected.items()}
    shown = {name: plain_name(name) for group in stream.groups for name in group}
    assert all(len(group) == 1 or sum(sizes[shown[name]] for name in group) <= most for group in stream.groups)
    received = dict(stream.tensors())
    assert received.keys() <= expected.keys()
    assert all(torch.equal(received[name], expected[name]) for name in received)


@each_precision
def test_a_score_head_stays_plain_and_learns(bits: Bits, tiny_model: Any) -> None:
    model = load(tiny_model(), "score", bits)
    assert not quantization.is_quantised(model.score)
    add_adapters(model, model.score, lora(bits), 7, train_head=True)
    trained = {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"score", "default"}


@each_precision
def test_quantized_modules_cannot_be_trained_whole(bits: Bits, tiny_model: Any) -> None:
    model = load(tiny_model(), bits=bits)
    config = lora(bits, modules_to_save=("q_proj",), target_modules=("v_proj",))
    with pytest.raises(UserError, match=rf"^training\.lora\.modules_to_save: .*q_proj is in {bits} bits and cannot"):
        add_adapters(model, model.lm_head, config, 7, train_head=False)


def test_a_model_without_linear_layers_is_refused_by_the_name_of_the_field() -> None:
    head = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"^training\.lora\.load_in_8bit: this model has no linear layer apart from"):
        quantization.quantise(torch.nn.Sequential(head), head, 8)


def test_4_and_8_bits_at_once_are_refused_and_neither_is_in_the_key_while_false() -> None:
    with pytest.raises(ValueError, match="either in 4 or in 8 bits: leave out `load_in_4bit` or `load_in_8bit`"):
        LoraConfig(load_in_4bit=True, load_in_8bit=True)
    assert not {"load_in_4bit", "load_in_8bit"} & LoraConfig(load_in_8bit=False).model_dump().keys()
    whole = ReferenceLogpsConfig().model_dump()
    assert ReferenceLogpsConfig(load_in_8bit=True).model_dump() == whole | {"load_in_8bit": True}


@each_precision
def test_quantization_without_bitsandbytes_is_refused_before_anything_runs(
    bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alignment_core.execution.packages import packages_of

    training = TrainingConfig(lora=lora(bits))
    assert packages_of(training) == ("bitsandbytes", "peft")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(
        UserError, match=rf"^training\.lora\.load_in_{bits}bit: .*not installed; .*'alignment\[qlora\]'$"
    ):
        packages_of(training)
