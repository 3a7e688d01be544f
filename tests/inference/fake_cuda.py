"""CUDA's memory for tests without a GPU: anonymous files stand for buffers of a GPU, and their names for handles."""

from __future__ import annotations

import os
from mmap import mmap

import torch


class FakeCuda:
    """In place of :class:`alignment_core.inference.channels.gpu_memory.Cuda`; each process has its own copy of the class."""

    own = "GPU-0"
    """The id of this process's GPU."""
    exports = True
    maps = True
    """Whether its memory can be exported, and whether it can map memory of other processes."""
    allocated_bytes = 0
    """Of the buffers that this process has allocated and not freed."""
    mappings = 0
    """Buffers that this process has mapped so far."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """Descriptors by the address of their buffer."""

    def gpu(self) -> str:
        return self.own

    def allocated(self, size: int) -> torch.Tensor:
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, size)
        buffer = torch.frombuffer(mmap(descriptor, size), dtype=torch.uint8)
        self._files[buffer.data_ptr()] = descriptor
        FakeCuda.allocated_bytes += size
        return buffer

    def exported(self, buffer: torch.Tensor) -> str:
        if not self.exports:
            raise RuntimeError("memory of this allocator cannot be exported")
        return f"/proc/{os.getpid()}/fd/{self._files[buffer.data_ptr()]}"

    def mapped(self, handle: str) -> torch.Tensor:
        if not self.maps:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        descriptor = os.open(handle, os.O_RDWR)
        size = os.fstat(descriptor).st_size
        buffer = torch.frombuffer(mmap(descriptor, size), dtype=torch.uint8)
        os.close(descriptor)
        FakeCuda.mappings += 1
        return buffer

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        FakeCuda.allocated_bytes = 0
