"""Attention over prefix trees: equal to that with a mask of all tokens, and used where a model can have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from alignment_core.models.attention import NAME, TreeAttention
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.prefix_tree import lay_out
from tests.stages.calls import python

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def trees(random: np.random.Generator) -> list[np.ndarray]:
    """Two prompts with answers, two of which share a prefix, and a separate sequence."""
    prompts = [random.integers(0, 60, 30), random.integers(0, 60, 20)]
    answers = [np.concatenate([prompt, random.integers(0, 60, 10 - n)]) for prompt in prompts for n in range(3)]
    longer = np.concatenate([answers[0], random.integers(0, 60, 20)])
    return [*answers, longer, np.concatenate([longer, random.integers(0, 60, 5)]), random.integers(0, 60, 11)]


@pytest.mark.parametrize(
    ("groups", "scale", "dtype"),
    [(1, None, torch.float32), (2, 0.3, torch.float32), (4, None, torch.float32), (2, None, torch.bfloat16)],
)
def test_output_and_gradients_are_those_of_attention_with_a_mask(
    groups: int, scale: float | None, dtype: torch.dtype
) -> None:
    layout = lay_out(trees(np.random.default_rng(0)))
    tokens, generator = len(layout.ids), torch.Generator().manual_seed(0)
    query, key, value, direction = (
        torch.randn(1, heads, tokens, 16, generator=generator).to(dtype).requires_grad_()
        for heads in (4, groups, groups, 4)
    )
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for places in layout.places:
        mask[places[:, None], places[None]] |= torch.ones(len(places), len(places), dtype=torch.bool).tril()
    masked = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    output = TreeAttention.apply(query, key, value, layout.nodes, scale)
    rounding = 10 * torch.finfo(dtype).eps
    assert (output - masked).norm() < rounding * masked.norm()
    for ours, theirs in zip(
        torch.autograd.grad((output * direction).sum(), (query, key, value)),
        torch.autograd.grad((masked * direction).sum(), (query, key, value)),
        strict=True,
    ):
        assert (ours - theirs).norm() < rounding * theirs.norm()


WITHOUT_PRIVATE_NAMES = """
import json, torch
namespace = type(torch.ops.aten)
get = namespace.__getattr__
def without(self, name):
    if self.name == "aten" and "flash_attention_for_cpu" in name:
        raise AttributeError(name)
    return get(self, name)
namespace.__getattr__ = without
for name in [name for name in vars(torch.ops.aten) if "flash_attention_for_cpu" in name]:
    delattr(torch.ops.aten, name)
from alignment_core.models import attention, packed
try:
    attention._kernels()
except AttributeError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_models_are_imported_where_pytorch_lacks_its_private_kernels() -> None:
    """Only attention on a CPU calls them."""
    assert python(WITHOUT_PRIVATE_NAMES) == "_scaled_dot_product_flash_attention_for_cpu"


def model_of(architecture: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(architecture, **{**TINY, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def rows_of(sequences: list[np.ndarray]) -> list[Row]:
    """All of whose tokens are targets that can be."""
    return [
        Row(number, (TokenSequence(sequence, np.arange(len(sequence)) > 0),))
        for number, sequence in enumerate(sequences)
    ]


def check_that_packed_is_alone(model: Any, share_prefixes: bool) -> None:
    """Log-probabilities of packed sequences are those of each sequence alone, by ``transformers``."""
    ids = trees(np.random.default_rng(1))
    alone = []
    with torch.no_grad():
        for sequence in ids:
            logps = torch.log_softmax(model(torch.from_numpy(sequence)[None]).logits[0], -1)
            alone.append(logps[torch.arange(len(sequence) - 1), torch.from_numpy(sequence[1:])])
        packed = PackedModel(model, "lm")
        assert packed.shares_prefixes == share_prefixes
        packed_logps = run_packed(packed, pack(rows_of(ids), share_prefixes=packed.shares_prefixes))
    torch.testing.assert_close(packed_logps, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma", "mistral", "phi3", "olmo2", "gpt_neox"])
def test_models_with_plain_attention_share_prefixes(architecture: str) -> None:
    more = {"sliding_window": None} if architecture == "mistral" else {}
    check_that_packed_is_alone(model_of(architecture, **more), share_prefixes=True)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("mistral", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("phimoe", {"sliding_window": 64, **FEW_EXPERTS}),  # the mask alone has it, and only in longer sequences
    ],
    ids=["mistral", "gemma3", "qwen2", "phimoe"],
)
def test_models_with_windows_keep_the_attention_of_transformers(architecture: str, more: dict[str, Any]) -> None:
    model = model_of(architecture, **more)
    check_that_packed_is_alone(model, share_prefixes=False)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_trains_with_dropout_in_its_attention_shares_nothing() -> None:
    assert not PackedModel(model_of("llama", attention_dropout=0.1), "lm", dropout=True).shares_prefixes
    assert PackedModel(model_of("llama", attention_dropout=0.1), "lm").shares_prefixes, "its dropout is off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_carries_state_from_token_to_token_has_a_line_for_each_sequence(dtype: torch.dtype) -> None:
    jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4}
    model = model_of("jamba", **jamba).to(dtype)
    assert PackedModel(model, "lm").one_sequence_per_line
    if dtype == torch.float32:
        check_that_packed_is_alone(model, share_prefixes=False)


def test_a_model_that_keeps_the_trees_from_its_layers_shares_nothing() -> None:
    model = model_of("llama")

    class Deaf(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: Any, nodes: Any = None, **more: Any) -> Any:
            return super().forward(*arguments, **more)

    model.__class__ = Deaf
    check_that_packed_is_alone(model, share_prefixes=False)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_counts_tokens_from_the_line_start_has_a_line_per_sequence() -> None:
    llama4 = {"attention_chunk_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 2}
    model = model_of("llama4_text", **llama4)
    assert PackedModel(model, "lm").one_sequence_per_line
    check_that_packed_is_alone(model, share_prefixes=False)


def test_an_empty_pack_has_one_token_in_a_line_of_its_own() -> None:
    module = PackedModel(model_of("llama"), "lm", share_prefixes=False)
    module.one_sequence_per_line = True
    assert run_packed(module, pack([], share_prefixes=False)).shape == (0,)


def test_a_model_for_short_sequences_can_be_packed() -> None:
    assert PackedModel(
        model_of("opt", max_position_embeddings=16, word_embed_proj_dim=32, ffn_dim=64), "lm"
    ).shares_prefixes


def test_tensors_of_any_strides_are_read_correctly() -> None:
    nodes = lay_out(trees(np.random.default_rng(0))).nodes
    tokens = max(end for _, end, _ in nodes)
    straight = [torch.randn(1, heads, tokens, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    strided = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in straight]
    expected, contiguous = (TreeAttention.apply(*tensors, nodes, None) for tensors in (straight, strided))
    torch.testing.assert_close(contiguous, expected)


def test_a_model_that_shares_prefixes_is_unchanged_outside_of_packs(tmp_path: Any) -> None:
    model = model_of("llama")
    ids = torch.arange(12).view(2, 6) % 5 + 1
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        assert PackedModel(model, "lm").shares_prefixes
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], before[mask.bool()])
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
