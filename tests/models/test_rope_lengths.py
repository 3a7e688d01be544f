"""Rotary positions that depend on the length of a sequence: log-probabilities are those of the sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from alignment_core.errors import UserError
from alignment_core.models.microbatch import pack
from alignment_core.models.packed import PackedModel, run_packed
from tests.models.test_attention import FEW_EXPERTS, model_of, rows_of

FIRST = 40
"""Tokens of the longest sequence with the first frequencies."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 4.0, 6.0],
    "original_max_position_embeddings": FIRST,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PHI3 = {"original_max_position_embeddings": FIRST, "rope_parameters": LONGROPE}
PHIMOE = {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}, **FEW_EXPERTS}
BY_LAYER = {
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": DYNAMIC,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", PHI3),
    "longrope of a mixture": ("phimoe", PHIMOE),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": FIRST}),
    "dynamic, two types of layers": ("gemma3_text", {**BY_LAYER, "max_position_embeddings": FIRST}),
}
LENGTHS = [60, 12, 41, 40, 9, 75, 20]


def spread(model: Any) -> Any:
    """With weights that are large enough for positions to matter."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= 4
    return model


def sequences() -> list[np.ndarray]:
    """Short and long sequences with a common prefix."""
    random = np.random.default_rng(0)
    start = random.integers(1, 60, 20)
    return [np.concatenate([start, random.integers(1, 60, 60)])[:length] for length in LENGTHS]


def alone(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities of a sequence by a fresh copy of a model of ``transformers``, which has seen nothing before."""
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        logps = torch.log_softmax(copy.deepcopy(model)(tokens[None]).logits[0], -1)
    return logps[torch.arange(len(ids) - 1), tokens[1:]]


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_in_a_pack_change_nothing(name: str) -> None:
    architecture, changes = MODELS[name]
    model, ids = spread(model_of(architecture, **changes)), sequences()
    expected = torch.cat([alone(model, sequence) for sequence in ids])
    packed = PackedModel(model, "lm")
    with torch.no_grad():
        for _ in range(2):  # `transformers` remembers the longest sequence of the first pass
            logps = run_packed(packed, pack(rows_of(ids), share_prefixes=packed.shares_prefixes))
            torch.testing.assert_close(logps, expected, atol=2e-5, rtol=2e-5)
            part = run_packed(packed, pack(rows_of(ids[1:2]), share_prefixes=packed.shares_prefixes))
            torch.testing.assert_close(part, alone_part(expected, 1), atol=2e-5, rtol=2e-5)


def alone_part(logps: torch.Tensor, number: int) -> torch.Tensor:
    return logps.split([length - 1 for length in LENGTHS])[number]


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_in_a_separate_line_has_its_own_positions(name: str) -> None:
    architecture, changes = MODELS[name]
    model, ids = spread(model_of(architecture, **changes)), sequences()
    expected = torch.cat([alone(model, sequence) for sequence in ids])
    packed = PackedModel(model, "lm")
    packed.one_sequence_per_line = True
    with torch.no_grad():
        logps = run_packed(packed, pack(rows_of(ids), share_prefixes=False))
    torch.testing.assert_close(logps, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_the_length_matters_to_these_models(name: str) -> None:
    """Or the tests above would test nothing: the first 40 tokens of a longer sequence have other log-probabilities."""
    architecture, changes = MODELS[name]
    model, ids = spread(model_of(architecture, **changes)), sequences()
    whole = alone(model, ids[5])
    assert (whole[: FIRST - 1] - alone(model, ids[5][:FIRST])).abs().max() > 1e-2


@pytest.mark.parametrize("context", [FIRST, 80])
@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_with_a_context_all_sequences_have_positions_of_that_length(name: str, context: int) -> None:
    """As in vLLM, which decides by ``max_model_len``. The expected value is `transformers`' for the sequence, continued to
    the length of the context, as attention is causal. With equal positions, prefixes can be shared."""
    architecture, changes = MODELS[name]
    model = spread(model_of(architecture, **changes))
    ids = [sequence for sequence in sequences() if len(sequence) <= context]
    filled = [np.concatenate([sequence, np.ones(context - len(sequence), np.int64)]) for sequence in ids]
    expected = torch.cat([alone(model, long)[: len(sequence) - 1] for sequence, long in zip(ids, filled, strict=True)])
    for share in (True, False):
        packed = PackedModel(copy.deepcopy(model), "lm", share_prefixes=share, context=context)
        assert packed.shares_prefixes == share
        with torch.no_grad():
            logps = run_packed(packed, pack(rows_of(ids), share_prefixes=packed.shares_prefixes))
        torch.testing.assert_close(logps, expected, atol=2e-5, rtol=2e-5)


def test_a_sequence_beyond_the_context_shares_no_prefix_with_others() -> None:
    packed = PackedModel(model_of("phi3", **PHI3), "lm", context=FIRST)
    with pytest.raises(UserError, match="a sequence of 75 tokens is longer than any that is sampled"):
        run_packed(packed, pack(rows_of(sequences())))


def test_models_with_other_positions_are_unchanged() -> None:
    packed = PackedModel(model_of("llama"), "lm")
    assert packed.shares_prefixes
    assert not packed.rope.needed
    assert "forward" not in vars(packed.model.model.rotary_emb)


def test_a_model_that_counts_chunks_from_the_beginning_of_a_line_is_known_by_its_configuration() -> None:
    """Chunks of 8,192 tokens, Llama 4's, are longer than the sequences that models are tried with when they are loaded."""
    llama4 = {"attention_chunk_size": 100, "intermediate_size_mlp": 64, "num_local_experts": 2}
    model, ids = spread(model_of("llama4_text", **llama4)), sequences()
    expected = torch.cat([alone(model, sequence) for sequence in ids])
    packed = PackedModel(model, "lm")
    with torch.no_grad():
        logps = run_packed(packed, pack(rows_of(ids), share_prefixes=packed.shares_prefixes))
    torch.testing.assert_close(logps, expected, atol=2e-5, rtol=2e-5)
