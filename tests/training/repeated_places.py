"""A gradient to which several threads of a trainer add at the same places; a trainer imports it by name."""

from __future__ import annotations

import torch


def gradients(times: int) -> tuple[int, list[bytes]]:
    """Number of threads of this process, and the gradient of rows that are read many times, computed ``times`` times."""
    generator = torch.Generator().manual_seed(0)
    states_NH = torch.randn(64, 512, generator=generator).requires_grad_()
    places_K = torch.randint(64, (4096,), generator=generator)
    weights_KH = torch.randn(4096, 512, generator=generator)
    results = []
    for _ in range(times):
        (gradient,) = torch.autograd.grad((states_NH[places_K] * weights_KH).sum(), states_NH)
        results.append(gradient.numpy().tobytes())
    return torch.get_num_threads(), results
