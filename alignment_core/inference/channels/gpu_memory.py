"""Buckets in the memory of the sender's GPU, which receivers on the same GPU map (CUDA IPC); others on the node read copies of
them in the memory of the CPU.

A buffer is there during an update alone: trainers and engines on the same GPU need its memory in between.
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING, Any

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

        arguments: list[Any] = list(pickle.loads(base64.b64decode(handle)))
        arguments[6] = torch.cuda.current_device()  # the sender's number of the GPU may be another one
        return rebuild_cuda_tensor(*arguments)

    def synchronize(self) -> None:
        """Wait for all work of this process on its GPU."""
        import torch

        torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory that is not used back to the GPU."""
        import torch

        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class GpuMemory(Transport):
    """Buffers of a GPU that receivers map or, on another GPU, read in copies."""

    def __init__(self, peers: Peers, is_sender: bool, size: int, count: int) -> None:
        self._peers = peers
        self._is_sender = is_sender
        self._size = size
        self._count = count
        self._cuda = Cuda()
        self._copies: SharedMemory | None = None
        """Buffers in the memory of the CPU, if some receiver reads them."""
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
        self.buffers = [self._cuda.allocated(self._size) for _ in range(self._count)]
        own = self._cuda.gpu()
        gpus = self._peers.receive()
        self._peers.send_each([self._handles() if gpu == own else None for gpu in gpus])
        needs_copies = not all(self._peers.receive())
        makes_copies = needs_copies and self._copies is None
        self._peers.send(makes_copies)
        if makes_copies:
            self._copies = SharedMemory(self._peers, True, self._size, self._count)

    def _handles(self) -> list[str] | None:
        try:
            return [self._cuda.exported(buffer) for buffer in self.buffers]
        except RuntimeError:  # an allocator whose memory cannot be exported
            return None

    def _accept(self) -> None:
        self._peers.send(self._cuda.gpu())
        handles = self._peers.receive()[0]
        try:
            mapped = [self._cuda.mapped(handle) for handle in handles or ()]
        except RuntimeError:  # such as in a container that may not map memory of others
            mapped = []
        self._peers.send(bool(mapped))
        if self._peers.receive()[0]:
            self._copies = SharedMemory(self._peers, False, self._size, self._count)
        if not mapped:
            assert self._copies is not None, "the sender makes copies for those that map nothing"
            mapped = list(self._copies.buffers)
        self.buffers = mapped

    def written(self, buffer: Tensor) -> None:
        if self._copies is not None:
            self._copies.buffers[self._written % self._count][: len(buffer)].copy_(buffer)
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
