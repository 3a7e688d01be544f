"""Weights in 4 bits: their values, equal on every path, and refused models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.artifacts import Reference
from alignment_core.errors import UserError
from alignment_core.models import quantization, weight_transfer
from alignment_core.models.adapters import adapters_off, add_adapters, merged
from alignment_core.models.loading import Head
from alignment_core.models.model_ref import Model
from alignment_core.recipes import LoraConfig, TrainingConfig

IDS = torch.arange(40)[None]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0]
"""Dettmers et al. 2023, appendix E."""


def load(path: Path, head: Head = "lm", in_4bit: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    return Model(path, Reference(kind="model", digest="a" * 64), in_4bit=in_4bit).load(head, dtype, 5)


def adapted(model: Any, head: Any, **config: Any) -> Any:
    add_adapters(model, head, LoraConfig(r=4, load_in_4bit=True, **config), 7, train_head=False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_each_weight_is_the_nearest_of_sixteen_times_the_largest_of_its_block(tiny_model: Any) -> None:
    plain, small = load(tiny_model(), in_4bit=False), load(tiny_model())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_paths_compute_with_the_same_numbers(dtype: torch.dtype, tiny_model: Any) -> None:
    rounded, small = load(tiny_model(), in_4bit=False, dtype=dtype), load(tiny_model(), dtype=dtype)
    quantization.round_to_4_bits(rounded, rounded.lm_head, dtype)
    expected = rounded(IDS).logits.detach()
    torch.testing.assert_close(small.train()(IDS).logits, expected)
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(IDS).logits, expected)
        torch.testing.assert_close(small(IDS).logits, expected, msg="looking does not change them")
    assert float((load(tiny_model(), in_4bit=False, dtype=dtype)(IDS).logits - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"target_modules": ("q_proj",)}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_merged_weights_equal_the_trained_model(name: str, config: dict[str, Any], tiny_model: Any) -> None:
    path = tiny_model(name)
    small = load(path)
    adapted(small, small.lm_head, **config)
    whole = load(path, in_4bit=False)
    weights = merged(small, small.state_dict())
    assert weights.keys() == whole.state_dict().keys(), "no scales among them"
    whole.load_state_dict(weights)
    torch.testing.assert_close(whole(IDS).logits, small(IDS).logits, atol=1e-5, rtol=1e-5)
    with adapters_off(small):
        torch.testing.assert_close(small(IDS).logits, load(path)(IDS).logits)


def test_buckets_bring_plain_weights_and_count_their_bytes(tiny_model: Any) -> None:
    small = load(tiny_model())
    adapted(small, small.lm_head)
    expected, most = merged(small, small.state_dict()), 1 << 14
    receiver, sender = weight_transfer.Receiver(), weight_transfer.Sender(small, 0, 0)
    received = {}
    for share in weight_transfer.plan(small, most):
        bucket = sender.bucket(share)
        assert sum(piece.numbers.nbytes for piece in bucket) <= most
        received |= dict(receiver.add(bucket))
    assert received.keys() <= expected.keys()
    assert all(torch.equal(received[name], expected[name]) for name in received)


def test_a_score_head_stays_plain_and_learns(tiny_model: Any) -> None:
    model = load(tiny_model(), "score")
    assert not quantization.is_quantised(model.score)
    add_adapters(model, model.score, LoraConfig(load_in_4bit=True), 7, train_head=True)
    trained = {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"score", "default"}


def test_4_bit_modules_cannot_be_trained_whole(tiny_model: Any) -> None:
    model = load(tiny_model())
    config = LoraConfig(load_in_4bit=True, modules_to_save=("q_proj",), target_modules=("v_proj",))
    with pytest.raises(UserError, match=r"^training\.lora\.modules_to_save: .*q_proj is in 4 bits"):
        add_adapters(model, model.lm_head, config, 7, train_head=False)


def test_4_bits_without_bitsandbytes_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from alignment_core.execution.packages import packages_of

    training = TrainingConfig(lora=LoraConfig(load_in_4bit=True))
    assert packages_of(training) == ("bitsandbytes", "peft")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(UserError, match=r"^training\.lora\.load_in_4bit: .*not installed; .*'alignment\[qlora\]'$"):
        packages_of(training)
