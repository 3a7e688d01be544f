"""Log-probabilities by the head in chunks of places against the logits of all places: peak memory and processor seconds.

    python -m tests.benchmarks head

Forward and backward passes: memory of the head alone, so that no other layer dilutes the ratio; seconds of the head alone and,
with a bound, of a whole model, because the backward pass computes the logits again unless the loss is declared to be a sum.
Whole logits are computed as before there were chunks, and as for a model whose logits depend on other places. Exits with 1 if a
ratio exceeds its bound.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from alignment_core.losses.logprobs import token_logps
from alignment_core.machine_memory import GIB, gib, machine_memory
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.vocabulary_head import VocabularyHead
from tests.benchmarks.training import alternate


@dataclass(frozen=True)
class Size:
    vocabulary: int
    places: int
    hidden: int


FOR_MEMORY = Size(152_000, 8192, 72)
"""Logits in fp32 are 4.98 GB. Whole logits take three times as much in the backward pass: log-softmax, its gradient, and that
of the logits. The hidden size is small, so that weights and hidden states hardly count."""
FOR_SECONDS = Size(49_152, 1024, 576)
"""Vocabulary and hidden size of SmolLM2-135M."""
NEEDED = 15 * GIB
"""Free memory that whole logits take."""
MOST_MEMORY, MOST_SECONDS = 0.15, 1.05
"""Bounds of what chunks take of what whole logits take."""
WHOLE, CHUNKED, CHUNKED_SUM = "whole logits", "chunks", "chunks, loss declared to be a sum"


def new_model(size: Size, **shape: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, num_attention_heads=9, tie_word_embeddings=True, **shape
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(logps_K: Tensor, side: str) -> Tensor:
    if side == CHUNKED_SUM:
        return -0.5 * logps_K.sum()
    return (torch.linspace(-1, 2, len(logps_K)) * logps_K).sum()


class Head:
    """A head with random weights, and its passes."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        torch.set_num_threads(1)
        self.head = VocabularyHead(new_model(size, intermediate_size=8, num_hidden_layers=1).to(dtype))
        self.states_KH = torch.randn(size.places, size.hidden).to(dtype).requires_grad_()
        self.labels_K = torch.randint(size.vocabulary, (size.places,))

    def passes(self, side: str, places: int | None = None) -> list[Tensor]:
        """Log-probabilities of the first ``places``, and the gradients of a loss by hidden states and weights."""
        states_KH = self.states_KH[:places]
        if side == WHOLE:
            logps_K = self.head.of_logits(self.head.layer(states_KH), self._logps)
        else:
            self.head.of_sum = side == CHUNKED_SUM
            logps_K = self.head(states_KH, self._logps)
        gradients = torch.autograd.grad(loss_of(logps_K, side), [self.states_KH, self.head.layer.weight])
        return [logps_K.detach(), *gradients]

    def _logps(self, logits_kV: Tensor, places: slice) -> Tensor:
        return token_logps(logits_kV, self.labels_K[places][: len(logits_kV)])


class Model:
    """A model of the shape of SmolLM2-135M with random weights, and its passes over rows of 129 tokens, all of them targets."""

    def __init__(self, size: Size) -> None:
        torch.set_num_threads(1)
        shape = {"intermediate_size": 1536, "num_hidden_layers": 30, "num_key_value_heads": 3}
        self.packed = PackedModel(new_model(size, **shape), "lm").train()
        self.after = self.packed.vocabulary.after
        random = np.random.default_rng(0)
        ids = random.integers(size.vocabulary, size=(size.places // 128, 129))
        rows = [Row(number, (TokenSequence(of_row, np.arange(129) > 0),)) for number, of_row in enumerate(ids)]
        self.micro = pack(rows, share_prefixes=self.packed.shares_prefixes)

    def passes(self, side: str) -> list[Tensor]:
        """Log-probabilities, and the gradients of a loss."""
        self.packed.vocabulary.after = None if side == WHOLE else self.after
        self.packed.vocabulary.of_sum = side == CHUNKED_SUM
        logps_K = run_packed(self.packed, self.micro)
        return [logps_K.detach(), *torch.autograd.grad(loss_of(logps_K, side), [*self.packed.parameters()])]


def memory_lines() -> Iterator[dict[str, Any]]:
    """Each side in a process of its own."""
    if (free := machine_memory().free) < NEEDED:
        sys.exit(f"whole logits take up to {gib(NEEDED)} of memory, and {gib(free)} are free: end other programs")
    for dtype in (torch.float32, torch.bfloat16):
        whole = _in_process(dtype, WHOLE)
        for side in (CHUNKED, CHUNKED_SUM):
            chunked = _in_process(dtype, side)
            yield {
                "measured": "memory of the head",
                "type": str(dtype).removeprefix("torch."),
                "side": side,
                **vars(FOR_MEMORY),
                "bytes": chunked,
                "whole_bytes": whole,
                "ratio": round(chunked / whole, 4),
                "bound": MOST_MEMORY,
            }


def _in_process(dtype: torch.dtype, side: str) -> int:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(peak, dtype, side).result()


def peak(dtype: torch.dtype, side: str) -> int:
    """The most resident bytes of this process during the passes, beyond those before."""
    head = Head(FOR_MEMORY, dtype)
    head.passes(side, 2)  # libraries allocate memory of their own in the first call
    before = _resident("VmRSS")
    head.passes(side)
    most = _resident("VmHWM")
    assert most > before, "the most was reached before the passes"
    return most - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def seconds_lines() -> Iterator[dict[str, Any]]:
    """In fp32, all sides in this process, in turn."""
    for name, bound in (("model", MOST_SECONDS), ("head", None)):
        passes = (Model(FOR_SECONDS) if name == "model" else Head(FOR_SECONDS, torch.float32)).passes
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(passes(CHUNKED), passes(WHOLE), strict=True)]
        sides = {side: partial(passes, side) for side in (WHOLE, CHUNKED, CHUNKED_SUM)}
        seconds = alternate(sides, time.process_time)  # type: ignore[arg-type]
        for side in (CHUNKED, CHUNKED_SUM):
            yield {
                "measured": f"processor seconds of the {name}",
                "type": "float32",
                "side": side,
                **vars(FOR_SECONDS),
                "seconds": round(seconds[side], 3),
                "whole_seconds": round(seconds[WHOLE], 3),
                "ratio": round(seconds[side] / seconds[WHOLE], 3),
                "bound": bound,
                "differs_by": float(f"{max(differences):.1e}"),
            }


def main() -> int:
    missed = False
    for line in chain(memory_lines(), seconds_lines()):
        print(json.dumps(line), flush=True)
        missed |= line["bound"] is not None and line["ratio"] > line["bound"]
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
