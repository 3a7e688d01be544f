"""A stream of tensors as buckets of bytes: none is larger than a given size, so large tensors are split over several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BUCKET_BYTES = 32 << 20
"""Size of a bucket in the memory of a CPU."""


class Slice(NamedTuple):
    """The place of a tensor, or of a part of it, in a bucket. All counts are bytes."""

    name: str
    dtype: str
    """Name of the type in torch."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first: int
    """Where the part begins in the whole tensor."""
    offset: int
    """Where it begins in the bucket."""
    size: int


Layout = Sequence[Slice]
Bucket = tuple[Layout, "np.ndarray"]
"""A layout and its bytes, [N] uint8."""


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]], next_buffer: Callable[[], Tensor]
) -> Iterator[tuple[Layout, Tensor]]:
    """Copy tensors into buffers, one after the other; yields each full buffer, [N] uint8, and its layout.

    ``next_buffer`` is called when the next bucket begins, once the caller is done with the last one.
    """
    import torch

    buffer: Tensor | None = None
    layout: list[Slice] = []
    used = 0
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        first = 0
        while True:  # once for a tensor without elements
            if buffer is None:
                buffer, used = next_buffer(), 0
            size = min(len(buffer) - used, len(data) - first)
            buffer[used : used + size].copy_(data[first : first + size])
            layout.append(Slice(name, dtype, tuple(tensor.shape), first, used, size))
            used += size
            first += size
            if used == len(buffer):
                yield layout, buffer
                buffer, layout = None, []
            if first == len(data):
                break
    if buffer is not None:
        yield layout, buffer[:used]


class Assembler:
    """Puts tensors together that come in buckets, in memory of their own: vLLM keeps those of a layer until it has all."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Tensor, int]] = {}
        """Incomplete tensors, and how many of their bytes are missing."""

    def add(self, layout: Layout, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are complete with this bucket, on the device of ``buffer``."""
        import torch

        for part in layout:
            if part.name not in self._begun:
                dtype = getattr(torch, part.dtype)
                tensor = torch.empty(part.shape, dtype=dtype, device=buffer.device)
                self._begun[part.name] = tensor, math.prod(part.shape) * dtype.itemsize
            tensor, missing = self._begun.pop(part.name)
            of_part = tensor.view(-1).view(torch.uint8)[part.first : part.first + part.size]
            of_part.copy_(buffer[part.offset : part.offset + part.size])
            if missing > part.size:
                self._begun[part.name] = tensor, missing - part.size
            else:
                yield part.name, tensor


def to_buckets(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights in buckets that have memory of their own."""
    import torch

    for layout, buffer in fill_buckets(weights, lambda: torch.empty(size, dtype=torch.uint8)):
        yield layout, buffer.numpy()


def from_bucket(assembler: Assembler, bucket: Bucket) -> list[tuple[str, Any]]:
    """The tensors that are complete with a bucket of :func:`to_buckets`."""
    import torch

    layout, numbers = bucket
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has no read-only tensors; this one is only read
        buffer = torch.from_numpy(numbers)
    return list(assembler.add(layout, buffer))
