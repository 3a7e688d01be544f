"""What each rank of a process group computes in test_tensor_parallel.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from alignment_core.models.activations import recompute
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.tensor_parallel import (
    TensorGroup,
    gathered,
    gathered_state,
    gradient_norm,
    part_of,
    split,
    tensor_group,
)
from alignment_core.models.weight_transfer import WeightStream
from tests.models.sequence_ranks import check_parts, loss_of, micro_batch, model_of, parts_of_logits

SOFTCAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"more": {"attention_bias": True, "mlp_bias": True}},
    "llama, tied": {"more": {"tie_word_embeddings": True}},
    "llama, scores": {"head": "score"},
    "llama, values": {"head": "value"},
    "mistral": {"architecture": "mistral"},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "more": {"head_dim": 8}},
    "smollm3": {"architecture": "smollm3"},
    "gemma": {"architecture": "gemma", "more": {"head_dim": 8}},
    "gemma2": {
        "architecture": "gemma2",
        "more": {"head_dim": 8, "sliding_window": 16, **SOFTCAPS},
        "attention": "eager",
    },
    "gemma3_text": {"architecture": "gemma3_text", "more": {"head_dim": 8, "sliding_window": 16}},
    "granite": {"architecture": "granite"},
    "phi": {"architecture": "phi", "more": {"hidden_size": 64}},
    "starcoder2": {"architecture": "starcoder2", "more": {"sliding_window": None}},
    "gpt_neox": {"architecture": "gpt_neox", "more": {"hidden_size": 64}},
    "entropies": {"loss": "entropies"},
    "candidates": {"loss": "candidates"},
    "sum": {"loss": "sum"},
    "all recomputed": {"recomputed": "all"},
    "cheap ones recomputed": {"recomputed": "selective"},
    "one sequence": {"rows": "one"},
}
"""Variants of a small model and of what is computed with it; each family that can be split is among them."""


def packed_of(case: dict[str, Any], group: TensorGroup | None) -> PackedModel:
    head = case.get("head", "lm")
    model = model_of(head, case.get("architecture", "llama"), keys=4, **case.get("more", {}))
    for name, parameter in model.named_parameters():  # biases are zero, and norms one, at first
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.data += 0.1 * noise
    if case.get("attention"):
        model.set_attn_implementation(case["attention"])
    if what := case.get("recomputed"):
        recompute(model, what)
    packed = PackedModel(model, head, case.get("loss") == "entropies").train()
    if group is not None:
        split(model, group)
    if case.get("loss") == "sum":
        packed.vocabulary.of_sum = True
    return packed


def computed(case: dict[str, Any], group: TensorGroup | None) -> tuple[Tensor, Tensor, PackedModel]:
    """Output, loss, and the model with its gradients."""
    packed = packed_of(case, group)
    micro = micro_batch(case, packed.shares_prefixes)
    with parts_of_logits(group) as counts:
        output = run_packed(packed, micro)
        loss = loss_of(output, micro, packed, case.get("loss", ""))
        loss.backward()
    check_parts(case, group, counts)
    return output.detach(), loss.detach(), packed


def differences(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Of each case: how much the results of all ranks together differ from those of one."""
    group = tensor_group(world, 60.0)
    result = {}
    for name, case in CASES.items():
        output, loss, whole = computed(case, None)
        ours, our_loss, packed = computed(case, group)
        squares, norms = 0.0, 0.0
        for at, parameter in packed.named_parameters():
            expected = whole.get_parameter(at).grad
            if expected is None or parameter.grad is None:
                assert parameter.grad is expected is None
                continue
            squares += float((gathered(parameter, parameter.grad) - expected).square().sum())
            norms += float(expected.square().sum())
        before = whole.state_dict()
        changed = [float((value - before[key]).abs().max()) for key, value in gathered_state(packed, True).items()]
        norm = norms**0.5
        result[name] = {
            "output": float((ours - output).abs().max() / output.abs().max()),
            "loss": abs(float(our_loss) - float(loss)) / abs(float(loss)),
            "gradient": squares**0.5 / norm,
            "norm": norm,
            "difference of norms": abs(float(gradient_norm(packed.parameters(), group)) - norm) / norm,
            "weights": max(changed),
            "part": sum(p.numel() for p in packed.parameters() if part_of(p)) / sum(p.numel() for p in _linear(whole)),
        }
    return result


def _linear(whole: PackedModel) -> list[Tensor]:
    """Parameters of the linear layers, without the head, whose inputs or outputs are shared by ranks."""
    layers = {
        at: module for at, module in whole.model.base_model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    last = ("o_proj", "down_proj", "dense", "fc2", "c_proj", "dense_4h_to_h")
    return [
        parameter
        for at, layer in layers.items()
        for name, parameter in layer.named_parameters()
        if name == "weight" or at.rpartition(".")[2] not in last
    ]


def sums(rank: int, world: int) -> list[int]:
    """Sums over ranks in the forward pass, and in the backward pass, of a model with two layers."""
    packed = packed_of({}, tensor_group(world, 60.0))
    counts = []
    with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as all_reduce:
        output = run_packed(packed, micro_batch({}))
        counts.append(all_reduce.call_count)
        output.sum().backward()
        counts.append(all_reduce.call_count - counts[0])
    return counts


def streamed(rank: int, world: int) -> dict[str, float]:
    """How much weights for engines differ from those of the model, by name; none on ranks other than 0."""
    model = model_of("lm", keys=4)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split(model, tensor_group(world, 60.0))
    weights = dict(WeightStream(model, rank, zero_stage=0, size=40_000).tensors())
    assert not weights or weights.keys() == whole.keys()
    return {name: float((tensor - whole[name]).abs().max()) for name, tensor in weights.items()}
