"""Buckets in the memory of the sender's GPU, which receivers on the same GPU map (CUDA IPC); others on the node read copies of
them in the memory of the CPU.

A buffer is there during an update alone: trainers and engines on the same GPU need its memory in between. torch counts a buffer
as used from its export until the receiver drops its mapping, and keeps its memory until then: a handle that is never mapped has
to be released.
"""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alignment_core.inference.channels.buckets import BUCKET_BYTES
from alignment_core.inference.channels.control import Peers
from alignment_core.inference.channels.memory import SharedMemory
from alignment_core.inference.channels.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor


class Cuda:
    """The calls of CUDA that this module needs."""

    def gpu(self) -> str:
        """An id of this process's GPU that all processes know it by, whichever GPUs they see."""
        import torch

        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def allocated(self, size: int) -> Tensor:
        """A buffer of so many bytes."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def exported(self, buffer: Tensor) -> str:
        """A handle by which one other process may map a buffer."""
        from torch.multiprocessing.reductions import reduce_tensor

        return base64.b64encode(pickle.dumps(reduce_tensor(buffer)[1])).decode()

    def mapped(self, handle: str) -> Tensor:
        """The buffer of a handle, of a sender that knows the channel's key."""
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        device = torch.cuda.current_device()  # the sender's number of the GPU may be another one
        return rebuild_cuda_tensor(**{**_arguments(handle), "storage_device": device})

    def release(self, handle: str) -> None:
        """Count a handle as no longer used that no process has mapped."""
        import torch

        arguments = _arguments(handle)
        torch.UntypedStorage._release_ipc_counter_cuda(arguments["ref_counter_handle"], arguments["ref_counter_offset"])

    def synchronize(self) -> None:
        """Wait for all work of this process on its GPU."""
        import torch

        torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory that is not used back to the GPU."""
        import torch

        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _arguments(handle: str) -> dict[str, Any]:
    """The arguments of a handle for torch's ``rebuild_cuda_tensor``, by name."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return inspect.signature(rebuild_cuda_tensor).bind(*pickle.loads(base64.b64decode(handle))).arguments


class GpuMemory(Transport):
    """Buffers of a GPU that receivers map or, on another GPU, read in copies. If none of them can map, there are only buffers
    in the memory of the CPU. Where some are, buckets are no larger than is usual there."""

    def __init__(self, peers: Peers, is_sender: bool, size: int, count: int) -> None:
        self._peers = peers
        self._is_sender = is_sender
        self._size = size
        self._count = count
        self._cuda = Cuda()
        self._copies: SharedMemory | None = None
        """Buffers in the memory of the CPU, if some receiver reads them."""
        self._cannot_map: set[int] = set()
        """Numbers of the receivers that mapped nothing in the last update: they are offered nothing any more."""
        self._written = 0
        """Buffers of this update."""
        self.buffers = []

    def begin(self) -> None:
        self._written = 0
        if self._is_sender:
            self._offer()
        else:
            self._accept()

    def _offer(self) -> None:
        """Export the buffers to the receivers on this GPU, each by handles of its own, as torch counts them."""
        own = self._cuda.gpu()
        may_map = [gpu == own and number not in self._cannot_map for number, gpu in enumerate(self._peers.receive())]
        if not all(may_map):
            self._size = min(self._size, BUCKET_BYTES)
        if any(may_map):
            self.buffers = [self._cuda.allocated(self._size) for _ in range(self._count)]
        self._peers.send_each([self._handles() if may else None for may in may_map])
        has_mapped = self._peers.receive()
        self._cannot_map = {number for number, has in enumerate(has_mapped) if not has}
        if not any(has_mapped):
            self._size = min(self._size, BUCKET_BYTES)
        makes_copies = not all(has_mapped) and self._copies is None
        self._peers.send(self._size if makes_copies else None)
        if makes_copies:
            self._copies = SharedMemory(self._peers, True, self._size, self._count)
        if not any(has_mapped):
            assert self._copies is not None, "they are made for those that map nothing"
            self.end()
            self.buffers = list(self._copies.buffers)

    def _handles(self) -> list[str] | None:
        """A handle for each buffer; None where memory cannot be exported, such as that of some allocators."""
        handles: list[str] = []
        try:
            for buffer in self.buffers:
                handles.append(self._cuda.exported(buffer))
        except RuntimeError:
            self._release(handles)
            return None
        return handles

    def _accept(self) -> None:
        self._peers.send(self._cuda.gpu())
        mapped = self._mapped(self._peers.receive()[0] or ())
        self._peers.send(bool(mapped))
        if (size := self._peers.receive()[0]) is not None:
            self._copies = SharedMemory(self._peers, False, size, self._count)
        if not mapped:
            assert self._copies is not None, "the sender makes copies for those that map nothing"
            mapped = list(self._copies.buffers)
        self.buffers = mapped

    def _mapped(self, handles: Sequence[str]) -> list[Tensor]:
        """The buffers of these handles; none where memory of others cannot be mapped, such as in some containers."""
        mapped: list[Tensor] = []
        try:
            for handle in handles:
                mapped.append(self._cuda.mapped(handle))
        except RuntimeError:
            self._release(handles[len(mapped) :])
            return []
        return mapped

    def _release(self, handles: Sequence[str]) -> None:
        for handle in handles:
            self._cuda.release(handle)

    def written(self, buffer: Tensor) -> None:
        if self._copies is not None:
            copy = self._copies.buffers[self._written % self._count][: len(buffer)]
            if copy.data_ptr() != buffer.data_ptr():
                copy.copy_(buffer)
        self._cuda.synchronize()  # other processes know nothing of the order of work on a GPU
        self._written += 1

    def read(self) -> None:
        self._cuda.synchronize()

    def end(self) -> None:
        self.buffers = []
        self._cuda.free()

    def close(self) -> None:
        self.end()
        if self._copies is not None:
            self._copies.close()
