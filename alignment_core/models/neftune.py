"""NEFTune: noise on the embeddings of fine-tuning (Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction
Finetuning", algorithm 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignment_core.canonical import derive_seed
from alignment_core.models.microbatch import MicroBatch


def embedding_noise(micro: MicroBatch, alpha: float, hidden_size: int, seed: int) -> Tensor:
    """Noise [L, W, hidden_size] for the embeddings of rows of one sequence each, without shared prefixes: uniform between
    ±α/√(T · hidden_size) for a row of T tokens.

    A row's noise follows from ``seed`` and its number, so that it does not depend on the number of ranks or on the rows that
    are packed with it.
    """
    is_shared = (
        micro.nodes is not None and micro.rows and micro.input_ids.numel() < sum(row.tokens for row in micro.rows)
    )
    assert not is_shared, "shared tokens have no noise of their own"
    device = micro.input_ids.device
    noise_NH = torch.zeros(micro.input_ids.numel(), hidden_size, device=device)
    generator = torch.Generator(device)
    for row, last in zip(micro.rows, micro.last_S.tolist(), strict=True):
        tokens = row.tokens
        bound = alpha / math.sqrt(tokens * hidden_size)
        generator.manual_seed(derive_seed(seed, row.number))
        noise_NH[last + 1 - tokens : last + 1].uniform_(-bound, bound, generator=generator)
    return noise_NH.view(*micro.input_ids.shape, hidden_size)
