"""FlexAttention over prefix trees: its mask is that of the trees, its output that of the CPU's, and a device is tried first."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import PreTrainedModel
from transformers.integrations.flex_attention import WrappedFlexAttention

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.models import attention, flex_trees
from alignment_core.models.attention import TreeAttention
from alignment_core.models.microbatch import pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.prefix_tree import Layout, lay_out
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.frozen import FrozenModel
from tests.models.test_attention import model_of, rows_of, trees

CPU = torch.device("cpu")


@some.composite
def layouts(draw: some.DrawFn) -> Layout:
    """Of sequences that begin with one of three texts, each up to some length."""
    texts = np.random.default_rng(0).integers(0, 60, (3, 400))
    sequences = []
    for number in range(draw(some.integers(1, 8))):
        common, own = draw(some.integers(0, 300)), draw(some.integers(1, 150))
        sequences.append(np.concatenate([texts[draw(some.integers(0, 2)), :common], np.full(own, 60 + number)]))
    return lay_out(sequences)


@given(layouts())
@settings(max_examples=40)
def test_the_block_mask_shows_a_token_the_earlier_tokens_of_its_sequences(layout: Layout) -> None:
    mask, tokens = flex_trees.block_mask(layout.nodes, CPU), len(layout.ids)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for places in map(torch.from_numpy, layout.places):
        seen[places[:, None], places] |= torch.ones(len(places), len(places), dtype=torch.bool).tril()
    assert create_mask(mask.mask_mod, None, None, tokens, tokens, "cpu")[0, 0].equal(seen)
    assert flex_trees.visible(layout.nodes, CPU)[0, 0].equal(seen)
    wanted = create_block_mask(mask.mask_mod, None, None, tokens, tokens, "cpu", BLOCK_SIZE=flex_trees.BLOCK)
    for counts, columns in [
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ]:
        assert getattr(mask, counts).equal(getattr(wanted, counts))
        for row, count in enumerate(getattr(mask, counts)[0, 0]):
            assert getattr(mask, columns)[0, 0, row, :count].equal(getattr(wanted, columns)[0, 0, row, :count])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def test_output_is_that_of_a_cpu() -> None:
    layout = lay_out([np.concatenate([np.zeros(200, int), tree]) for tree in trees(np.random.default_rng(0))])
    query, key, value = (torch.randn(1, heads, len(layout.ids), 16) for heads in (4, 2, 2))
    output = flex_trees.attend(torch.nn.Identity(), query, key, value, layout.nodes, 0.3).transpose(1, 2)
    torch.testing.assert_close(output, TreeAttention.apply(query, key, value, layout.nodes, 0.3))


@torch.no_grad()
def test_attention_stays_compiled_for_the_heads_of_many_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps eight compilations by default, and computes without compiling from the ninth on."""
    compiled = torch.compile(flex_attention, backend="eager")  # traced, without kernels
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: compiled)
    layout = lay_out([np.concatenate([np.zeros(200, int), tree]) for tree in trees(np.random.default_rng(0))])
    torch.compiler.reset()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for heads in range(1, 12):
                query, key, value = torch.randn(3, 1, heads, len(layout.ids), 16)
                output = flex_trees.attend(torch.nn.Identity(), query, key, value, layout.nodes, 0.3).transpose(1, 2)
                torch.testing.assert_close(output, TreeAttention.apply(query, key, value, layout.nodes, 0.3))
    finally:
        torch.compiler.reset()


def test_a_device_without_flex_attention_keeps_the_attention_of_transformers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU is one: FlexAttention has no backward pass there."""
    monkeypatch.setattr(flex_trees, "works", flex_trees.works.__wrapped__)
    with caplog.at_level(logging.WARNING), torch.compiler.set_stance("force_eager"):
        assert not flex_trees.works("cpu", torch.float32, 4, 2, 16)
    assert "FlexAttention does not run on this device (NotImplementedError)" in caplog.text
    monkeypatch.setattr(flex_trees, "works", lambda *_: False)
    model = model_of("llama")
    assert not PackedModel(model, "lm", device="cuda").shares_prefixes
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (6, 2)])
@torch.compiler.set_stance("force_eager")
def test_a_device_that_computes_gradients_too_passes_the_trial(
    heads: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU can without the compiler, though torch refuses to ask it."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    assert flex_trees.works.__wrapped__("cpu", dtype, heads, groups, 16)


def test_a_device_is_probed_with_the_heads_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(flex_trees, "works", lambda *of: requests.append(of) or True)
    assert PackedModel(model_of("llama"), "lm", device="cuda").shares_prefixes
    assert PackedModel(model_of("gpt_neox"), "lm", device="cuda").shares_prefixes
    assert requests == [("cuda", torch.float32, 4, 2, 8), ("cuda", torch.float32, 4, 4, 8)]
    requests.clear()
    assert PackedModel(model_of("llama"), "lm", device="cuda", layers_shared_by=2).shares_prefixes
    assert requests == [("cuda", torch.float32, 2, 1, 8)], "each rank computes half of the heads"


def test_a_model_is_on_its_device_before_it_is_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A processor without instructions for bf16 takes most of an hour for the probes of a model with 8B parameters."""
    events: list[str] = []
    states = attention._states
    monkeypatch.setattr(attention, "_probed", {})
    monkeypatch.setattr(attention, "_states", lambda *of, **more: events.append("forward pass") or states(*of, **more))
    monkeypatch.setattr(flex_trees, "works", lambda *_: True)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: events.append(f"to {device}") or model)
    model_of("llama").save_pretrained(tmp_path)
    model = Model(tmp_path, Reference("model", "a" * 64))
    frozen = FrozenModel(model, "lm", torch.bfloat16, ResourcesConfig(), Device("cuda", 1), 0, 1)
    assert frozen.packed.shares_prefixes
    assert events[0] == "to cuda"
    assert set(events[1:]) == {"forward pass"}


def test_a_device_with_wrong_results_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        flex_trees,
        "attend",
        lambda module, query, key, value, nodes, scale: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2),
    )
    assert not flex_trees.works.__wrapped__("cpu", torch.float32, 4, 2, 16)
    assert "FlexAttention on this device differs by" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this build of torch can use")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_gives_the_same_on_a_gpu_and_on_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(trees(np.random.default_rng(1)))
    model = model_of("llama", head_dim=64).to(dtype)
    gradients = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(attention, "_probed", {})
        packed = PackedModel(model.to(device), "lm", device=device).train()
        assert packed.shares_prefixes
        logps = run_packed(packed, pack(rows, device))
        gradients.append([logps, *torch.autograd.grad(logps.sum(), [*model.parameters()])])
    for on_cpu, on_gpu in zip(*gradients, strict=True):
        assert (on_cpu - on_gpu.cpu()).norm() <= torch.finfo(dtype).eps ** 0.5 * on_cpu.norm()
