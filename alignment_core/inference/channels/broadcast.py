"""Buckets by ``torch.distributed``'s broadcast from the sender to all receivers, on any nodes.

By NCCL between GPUs, otherwise by gloo. The process group is apart from those of DeepSpeed and vLLM.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from alignment_core.errors import PeerFailed, first_line
from alignment_core.inference.channels.control import OPEN_SECONDS, Peers
from alignment_core.inference.channels.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 0.001


class Broadcast(Transport):
    """Buffers of this process; the sender is rank 0. Those of a GPU are there during an update alone."""

    def __init__(self, peers: Peers, is_sender: bool, size: int, count: int, host: str, on_gpus: bool) -> None:
        self._peers = peers
        self._size = size
        self._count = count
        self._on_gpus = on_gpus
        store, rank, world = self._store(host) if is_sender else self._joined_store(host)
        own = host if is_sender else _own_host(peers)
        self._group = _process_group(store, rank, world, peers.seconds, None if on_gpus else own)
        self._works: list[Any] = []
        self.buffers = []

    def begin(self) -> None:
        import torch

        device = "cuda" if self._on_gpus else "cpu"
        while len(self.buffers) < self._count:
            self.buffers.append(torch.empty(self._size, dtype=torch.uint8, device=device))

    def _store(self, host: str) -> tuple[Any, int, int]:
        """The store by which the ranks find each other, rank 0, and the number of ranks; the receivers get theirs."""
        from torch.distributed import TCPStore

        listening = socket.create_server((host, 0))  # torch's own would listen on all interfaces
        port = listening.getsockname()[1]
        limit = timedelta(seconds=OPEN_SECONDS)
        store = TCPStore(
            host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        world = 1 + len(self._peers.connections)
        self._peers.send_each([{"port": port, "rank": rank, "world": world} for rank in range(1, world)])
        return store, 0, world

    def _joined_store(self, host: str) -> tuple[Any, int, int]:
        from torch.distributed import TCPStore

        place = self._peers.receive()[0]
        limit = timedelta(seconds=OPEN_SECONDS)
        return TCPStore(host, place["port"], timeout=limit, wait_for_workers=False), place["rank"], place["world"]

    def start(self, buffer: Tensor) -> None:
        """Begin to broadcast a buffer, or to receive into it."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._works.append(self._group.broadcast([buffer], options))

    def finish(self) -> None:
        """Wait for all broadcasts that have begun. Raises PeerFailed if another rank fails or dies meanwhile."""
        while self._works:
            work = self._works.pop(0)
            try:
                while not work.is_completed():
                    self._peers.check(POLL_SECONDS)
                work.wait()
            except RuntimeError as error:
                self._peers.raise_reason()
                raise PeerFailed(f"the broadcast of weights failed: {first_line(error)}") from error

    def end(self) -> None:
        import torch

        if self._on_gpus:
            self.buffers = []
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the process group, which ends the broadcasts of the other ranks."""
        self._group.abort()
        self.buffers = []


def _own_host(peers: Peers) -> str:
    """The address of this machine at which the sender sees it."""
    with socket.socket(fileno=os.dup(peers.connections[0].fileno())) as connection:
        return str(connection.getsockname()[0])


def _process_group(store: Any, rank: int, world: int, seconds: float, host: str | None) -> Any:
    """By gloo, whose sockets are those of ``host``; without one by NCCL, between GPUs."""
    from torch import distributed

    limit = timedelta(seconds=seconds)
    if host is not None:
        # Otherwise gloo would take the address that the machine's name has, or the interface of GLOO_SOCKET_IFNAME.
        gloo: Any = distributed.ProcessGroupGloo
        for_gloo = gloo._Options()
        for_gloo._devices = [gloo.create_device(hostname=host)]
        for_gloo._timeout = limit
        return gloo(store, rank, world, for_gloo)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    return distributed.ProcessGroupNCCL(store, rank, world, options)
