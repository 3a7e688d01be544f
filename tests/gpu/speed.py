"""Tokens per second of the learner, and its share of what the GPU can do (MFU: Chowdhery et al. 2022, PaLM, appendix B)."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment_core.models.microbatch import Row, TokenSequence
from tests.gpu.learner import joined, new_learner, step
from tests.gpu.size import LARGE, SMALL, Size, stored_model, the_device

PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "A10": 125}
"""Dense products in bf16 by the data sheets of NVIDIA, in TFLOP/s; the name of the GPU contains the key."""
SIZES = {"cpu": SMALL, "cuda": replace(LARGE, hidden=2048, layers=16, heads=16, groups=4)}
ROWS, TOKENS = {"cpu": 4, "cuda": 32}, {"cpu": 64, "cuda": 1024}
LAPS = 3


def run(kind: str) -> dict[str, Any]:
    """Full steps of AdamW in bf16 on rows that share nothing."""
    device, size = the_device(kind), SIZES[kind]
    random = np.random.default_rng(0)
    rows = []
    for number in range(ROWS[kind]):
        ids = random.integers(2, size.vocabulary, TOKENS[kind])
        rows.append(Row(number, (TokenSequence(ids, np.arange(len(ids)) > 0),)))
    with joined(device), tempfile.TemporaryDirectory() as folder:
        learner = new_learner(stored_model(Path(folder, "model"), size), device, zero_stage=0)
        parameters = learner.parameters()
        step(learner, rows)  # compiles, and makes the optimiser's states
        seconds = min(_seconds(lambda: step(learner, rows)) for _ in range(LAPS))
        memory = torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else None
        learner.close()
    products = _tflops(device.torch_device, 4096 if kind == "cuda" else 256)
    tokens = ROWS[kind] * TOKENS[kind]
    reached = tokens * flops_per_token(parameters, size, TOKENS[kind]) / seconds / 1e12
    figures = {
        "parameters": parameters,
        "tokens per second": tokens / seconds,
        "TFLOP/s": reached,
        "TFLOP/s of a product of matrices": products,
        "share of that product": reached / products,
    }
    if memory is not None:
        figures["most memory, GiB"] = memory
        name = torch.cuda.get_device_name()
        if peak := next((peak for part, peak in PEAKS.items() if part in name), None):
            figures["MFU"] = reached / peak
    assert all(np.isfinite(value) and value > 0 for value in figures.values()), figures
    return figures


def flops_per_token(parameters: int, size: Size, tokens: int) -> float:
    """Forward and backward pass: 6 for each parameter, and 12 · layers · hidden · length / 2 for causal attention."""
    return 6 * parameters + 6 * size.layers * size.hidden * tokens


def _tflops(device: str, side: int) -> float:
    """The rate of products of square matrices in bf16."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(_seconds(lambda: left @ right) for _ in range(5))
    return 2 * side**3 / seconds / 1e12


def _seconds(function: Any) -> float:
    _wait()
    started = time.perf_counter()
    function()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
