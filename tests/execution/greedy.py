"""A training method for the tests that requests far too much memory from the real allocator for large micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from alignment_core.training.methods.sft import Sft

MOST_TOKENS = 70


class Greedy(Sft):
    """SFT that runs out of memory above ``MOST_TOKENS`` tokens."""

    def loss(self, output: Any, batch: Any, reference_S: Any) -> Any:
        if sum(row.tokens for row in batch.rows) > MOST_TOKENS:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().loss(output, batch, reference_S)
