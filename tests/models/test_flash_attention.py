"""Packed lines by flash attention: each sequence sees itself alone. The package needs a GPU, so its functions are
written down below with PyTorch's attention, as its README defines them."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.models.flash_attention import NAME, bounds, check_flash_attention
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import ResourcesConfig
from tests.models.test_attention import TINY

CALLS: list[list[int]] = []
"""The bounds that the kernel got."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """[B, T, H, D]"""
    assert causal
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> torch.Tensor:
    """[N, H, D]"""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    CALLS.append(cu_seqlens_q.tolist())
    ends = cu_seqlens_q.tolist()
    pieces = [slice(start, end) for start, end in itertools.pairwise(ends)]
    return torch.cat([flash_attn_func(q[None, at], k[None, at], v[None, at], **options)[0] for at in pieces])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as flash

    functions: Any = ModuleType("flash_attn")
    functions.flash_attn_func = flash_attn_func
    functions.flash_attn_varlen_func = flash_attn_varlen_func
    functions.flash_attn_with_kvcache = None
    padding: Any = ModuleType("flash_attn.bert_padding")
    padding.pad_input = padding.unpad_input = None
    monkeypatch.setitem(sys.modules, "flash_attn", functions)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)


def rows() -> list[Row]:
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 60, length) for length in (300, 200, 150, 40, 7)]
    targets = [np.arange(len(ids)) > 2 for ids in sequences]
    return [
        Row(number, (TokenSequence(ids, mask),))
        for number, (ids, mask) in enumerate(zip(sequences, targets, strict=True))
    ]


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**TINY, "max_position_embeddings": 512, **more})
    ).eval()


@pytest.mark.usefixtures("package")
def test_log_probabilities_and_gradients_of_packed_lines_are_those_of_a_mask() -> None:
    results = []
    for flash in (False, True):
        packed = PackedModel(model(), "lm", share_prefixes=False, flash=flash)
        batch = pack(rows(), share_prefixes=False)
        assert batch.input_ids.shape[0] > 1, "several lines"
        logps = run_packed(packed, batch)
        logps.sum().backward()
        results.append((logps.detach(), packed.model.model.layers[0].self_attn.q_proj.weight.grad))
    for by_mask, by_flash in zip(*results, strict=True):
        torch.testing.assert_close(by_flash, by_mask, rtol=0, atol=1e-5)
    assert max(np.diff(CALLS[-1])) == 300


@pytest.mark.usefixtures("package")
def test_a_model_that_shares_prefixes_is_left_as_it_is() -> None:
    packed = PackedModel(model(), "lm", share_prefixes=True, flash=True)
    assert packed.shares_prefixes
    assert not packed.in_one_line


def test_bounds_of_sequences_in_a_line() -> None:
    options = bounds(torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert options["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
    assert options["max_length_k"] == 3


def test_where_the_kernel_does_not_run_a_sentence_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="computes on GPUs alone"):
        ResourcesConfig(attention="flash_attention_2", device="cpu")
    with pytest.raises(UserError, match=rf"{NAME} computes on GPUs alone"):
        check_flash_attention("cpu")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(EnvironmentFault, match="needs the package flash-attn, which is not installed"):
        check_flash_attention("cuda")


@pytest.mark.usefixtures("package")
def test_a_model_that_does_not_support_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "_supports_flash_attn", False)
    with pytest.raises(
        UserError, match=rf"resources.attention: {NAME} does not work for a qwen2 model: .* transformers: "
    ):
        PackedModel(model(), "lm", share_prefixes=False, flash=True)
