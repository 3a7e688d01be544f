"""The channel by which engines get weights of a trainer on the same GPU, or on the same CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import multiprocessing

from alignment_core.inference.channels.channel import Channel, Receiver, Sender, free_gpu_memory, gpu_bucket_bytes
from alignment_core.inference.channels.gpu_memory import Cuda
from tests.gpu.size import the_device
from tests.gpu.transfer import TENSORS, WAIT_SECONDS, checksums

UPDATES = 3
LEFT_BYTES = 64 << 20
"""Memory of a GPU that may be gone after the updates: CUDA's own, of the second process."""


def run(kind: str) -> dict[str, Any]:
    """Sends weights that change to another process, which loads them in memory of its own."""
    device = the_device(kind).torch_device
    count, numbers = TENSORS[kind]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(numbers, generator=generator).to(device, torch.bfloat16) for _ in range(count)]
    on_gpus = kind == "cuda"
    size = gpu_bucket_bytes([free_gpu_memory()]) if on_gpus else 0
    channel = Channel("memory", 1, WAIT_SECONDS, on_gpus=on_gpus, bucket_bytes=size)
    sender = Sender(channel)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    receiver = context.Process(target=_receive, args=(channel, sender.address, answers), daemon=True)
    receiver.start()
    seconds = []
    free = 0
    for update in range(UPDATES):
        started = time.perf_counter()
        sender.send((str(number), weight) for number, weight in enumerate(weights))
        seconds.append(time.perf_counter() - started)
        received, device_of_buffers = answers.get(timeout=WAIT_SECONDS)
        assert received == checksums(weights), f"the other process has other numbers after update {update}"
        assert device_of_buffers == kind, f"the other process reads buffers of the {device_of_buffers}"
        if on_gpus:
            taken = free - free_gpu_memory() if update else 0
            assert taken < LEFT_BYTES, f"{taken >> 20} MiB of the GPU are not free after update {update}"
            free = free_gpu_memory()
        for weight in weights:
            weight.mul_(2)
    sender.close()
    receiver.join(WAIT_SECONDS)
    if on_gpus:
        _release_unmapped(size)
    gib = sum(weight.nbytes for weight in weights) / 2**30
    return {"bucket, MiB": channel.size / 2**20, "sent, GiB": gib, "seconds per GiB": min(seconds) / gib}


def _release_unmapped(size: int) -> None:
    """Export a buffer that no process maps, as one that cannot would leave it."""
    cuda = Cuda()
    free = free_gpu_memory()
    cuda.release(cuda.exported(cuda.allocated(size)))
    cuda.free()
    taken = free - free_gpu_memory()
    assert taken < LEFT_BYTES, (
        f"{taken >> 20} MiB of the GPU are not free after a handle that was not mapped was released"
    )


def _receive(channel: Channel, address: Any, answers: Any) -> None:
    receiver = Receiver(channel, address)
    for _ in range(UPDATES):
        with receiver.receiving() as weights:
            name, tensor = next(weights)
            received = {name: tensor, **dict(weights)}
        answers.put((checksums(list(received.values())), tensor.device.type))
        del received, tensor
    receiver.close()
