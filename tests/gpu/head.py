"""The head in chunks of places against the whole logits: values, gradients, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alignment_core.losses.logprobs import token_logps
from alignment_core.models.vocabulary_head import VocabularyHead
from tests.gpu.size import new_model, relative, size_on, the_device

VOCABULARY = {"cpu": 1000, "cuda": 152_000}
TOKENS = {"cpu": 600, "cuda": 4096}
MOST = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Greatest relative error of log-probabilities and of gradients."""


def run(kind: str) -> dict[str, Any]:
    """In fp32 and bf16."""
    device = the_device(kind).torch_device
    size = replace(size_on(kind), layers=1, vocabulary=VOCABULARY[kind])
    figures: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = new_model(size, dtype).to(device)
        weight = model.lm_head.weight
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(TOKENS[kind], size.hidden, generator=generator).to(device, dtype).requires_grad_()
        labels = torch.randint(size.vocabulary, (TOKENS[kind],), generator=generator).to(device)

        def whole(states: Tensor = states, weight: Tensor = weight, labels: Tensor = labels) -> Tensor:
            logits = torch.nn.functional.linear(states, weight).float()
            return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]

        expected, most = _measured(whole, [states, weight], device)
        head = VocabularyHead(model)

        def chunked(head: VocabularyHead = head, states: Tensor = states, labels: Tensor = labels) -> Tensor:
            return head(states, lambda logits, places: token_logps(logits, labels[places]))

        result, least = _measured(chunked, [states, weight], device)
        errors = [relative(ours, theirs) for ours, theirs in zip(result, expected, strict=True)]
        figures[f"error, {name}"] = max(errors)
        if kind == "cuda":
            figures[f"memory of the whole logits, {name}, GiB"] = most / 2**30
            figures[f"memory in chunks, {name}, GiB"] = least / 2**30
            assert least < most / 2, f"in {name} chunks take {least / most:.0%} of the memory of whole logits"
        assert max(errors) <= MOST[dtype], f"in {name} it differs by {max(errors):.2g} from the whole logits"
    return figures


def _measured(function: Any, inputs: list[Tensor], device: str) -> tuple[list[Tensor], int]:
    """Log-probabilities and gradients of their sum, and the most bytes beyond those before."""
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    logps = function()
    gradients = torch.autograd.grad(logps.sum(), inputs)
    most = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return [logps.detach(), *gradients], most
