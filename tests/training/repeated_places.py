"""A computation of a trainer whose threads add to the same numbers."""

from __future__ import annotations

import torch


def gradients(times: int) -> tuple[int, list[bytes]]:
    """Threads of this process, and the gradient of rows that are read many times, computed over and over."""
    generator = torch.Generator().manual_seed(0)
    states_NH = torch.randn(64, 512, generator=generator).requires_grad_()
    places_K = torch.randint(64, (4096,), generator=generator)
    weights_KH = torch.randn(4096, 512, generator=generator)
    found = []
    for _ in range(times):
        (gradient,) = torch.autograd.grad((states_NH[places_K] * weights_KH).sum(), states_NH)
        found.append(gradient.numpy().tobytes())
    return torch.get_num_threads(), found
