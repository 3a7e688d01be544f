"""CUDA's memory for tests without a GPU: anonymous files stand for buffers of a GPU, and their names for handles.

As with torch, a buffer that was exported is only freed once all of its handles are released, by a receiver that drops its
mapping or by a call.
"""

from __future__ import annotations

import os
import weakref
from mmap import mmap

import torch

COUNTER_BYTES = 1


class FakeCuda:
    """In place of :class:`alignment_core.inference.channels.gpu_memory.Cuda`; each process has its own copy of the class."""

    own = "GPU-0"
    """The id of this process's GPU."""
    exports = 99
    maps = 99
    """How many buffers it can export, and how many buffers of other processes it can map."""
    allocated_bytes = 0
    """Of the buffers that this process has allocated and not freed."""
    allocations = 0
    """Buffers that this process has allocated so far."""
    mappings = 0
    """Buffers that this process has mapped so far."""

    def __init__(self) -> None:
        self._files: dict[int, list[int]] = {}
        """Descriptors by the address of their buffer: its own, and those of the counters of its handles."""
        self._limbo: list[list[int]] = []
        """Those of buffers that nothing here refers to."""

    def gpu(self) -> str:
        return self.own

    def allocated(self, size: int) -> torch.Tensor:
        descriptor, memory = _memory("gpu", size)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._files[buffer.data_ptr()] = [descriptor]
        FakeCuda.allocated_bytes += size
        FakeCuda.allocations += 1
        return buffer

    def exported(self, buffer: torch.Tensor) -> str:
        if FakeCuda.exports == 0:
            raise RuntimeError("memory of this allocator cannot be exported")
        FakeCuda.exports -= 1
        counter, memory = _memory("counter", COUNTER_BYTES)
        memory[0] = 1
        descriptors = self._files[buffer.data_ptr()]
        descriptors.append(counter)
        return " ".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (descriptors[0], counter))

    def mapped(self, handle: str) -> torch.Tensor:
        if FakeCuda.maps == 0:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        FakeCuda.maps -= 1
        name, counter = handle.split()
        memory = _opened(name)
        weakref.finalize(memory, _decrement, _opened(counter))
        FakeCuda.mappings += 1
        return torch.frombuffer(memory, dtype=torch.uint8)

    def release(self, handle: str) -> None:
        _decrement(_opened(handle.split()[1]))

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        limbo, self._limbo = [*self._limbo, *self._files.values()], []
        self._files = {}
        for descriptors in limbo:
            buffer, *counters = descriptors
            if any(os.pread(counter, COUNTER_BYTES, 0) != b"\0" for counter in counters):
                self._limbo.append(descriptors)
                continue
            FakeCuda.allocated_bytes -= os.fstat(buffer).st_size
            for descriptor in descriptors:
                os.close(descriptor)


def _memory(name: str, size: int) -> tuple[int, mmap]:
    """The descriptor of new memory, and a mapping of it."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor, mmap(descriptor, size)


def _opened(name: str) -> mmap:
    """The memory of another process."""
    descriptor = os.open(name, os.O_RDWR)
    try:
        return mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _decrement(counter: mmap) -> None:
    counter[0] -= 1
