"""Weights from a process to another one without a copy in between: by CUDA IPC on a GPU, by shared memory on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, multiprocessing

from tests.gpu.size import the_device

TENSORS = {"cpu": (8, 1 << 16), "cuda": (32, 1 << 24)}
"""How many tensors in bf16 are sent, and the numbers of each: 64 KiB in all on a CPU, 1 GiB on a GPU."""
WAIT_SECONDS = 60


def run(kind: str) -> dict[str, Any]:
    """Sends tensors, changes them, and compares what the other process sees each time."""
    device = the_device(kind).torch_device
    count, numbers = TENSORS[kind]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(numbers, generator=generator).to(device, torch.bfloat16) for _ in range(count)]
    if kind == "cpu":
        multiprocessing.set_sharing_strategy("file_system")
    context = multiprocessing.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    receiver = context.Process(target=_receive, args=(orders, answers), daemon=True)
    receiver.start()
    answers.get(timeout=WAIT_SECONDS)  # it has imported torch
    started = time.perf_counter()
    orders.put(weights)
    first = answers.get(timeout=WAIT_SECONDS)
    seconds = time.perf_counter() - started
    assert first == checksums(weights), "the other process sees other numbers"
    for weight in weights:
        weight.mul_(2)
    if kind == "cuda":
        torch.cuda.synchronize()
    orders.put("again")
    assert answers.get(timeout=WAIT_SECONDS) == checksums(weights), "the other process has a copy"
    assert first != checksums(weights)
    orders.put(None)
    receiver.join(WAIT_SECONDS)
    gib = sum(weight.nbytes for weight in weights) / 2**30
    return {"sent, GiB": gib, "seconds": seconds, "seconds per GiB": seconds / gib}


def checksums(weights: list[Tensor]) -> list[int]:
    """The sum of each tensor's bytes as integers."""
    return [int(weight.view(torch.int16).long().sum()) for weight in weights]


def _receive(orders: Any, answers: Any) -> None:
    answers.put(None)
    weights: list[Tensor] = []
    while (order := orders.get()) is not None:
        weights = weights if order == "again" else order
        answers.put(checksums(weights))
