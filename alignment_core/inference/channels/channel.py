"""A channel for weights between one sender, rank 0 of the trainers, and the workers of all engines.

The driver opens it on both sides. Then :meth:`Sender.send` and :meth:`Receiver.receiving` run at the same time for each update.
Both sides copy buckets while the other does, through two buffers. A layout (names, shapes, types) travels with the first bucket
that has it, and not again in later updates until it changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from alignment_core.inference.channels.broadcast import Broadcast
from alignment_core.inference.channels.buckets import BUCKET_BYTES, Assembler, Layout, Slice, fill_buckets
from alignment_core.inference.channels.control import Address, Listener, Peers, connect
from alignment_core.inference.channels.deltas import DeltaDecoder, DeltaEncoder
from alignment_core.inference.channels.gpu_memory import GpuMemory
from alignment_core.inference.channels.memory import SharedMemory
from alignment_core.inference.channels.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2
"""One is filled while the other is read."""
GPU_BUCKET_BYTES = 1 << 30
"""Size of a bucket in the memory of a GPU that has room for it."""
FREE_MEMORY_DIVISOR = 4
"""All buffers together take at most this part of a GPU's free memory: a quarter."""


@dataclass(frozen=True)
class Channel:
    """Plain data that both sides open."""

    kind: Literal["memory", "broadcast"]
    receivers: int
    """Number of workers of all engines."""
    seconds: float
    """Deadline of a wait for the other side."""
    host: str = "127.0.0.1"
    """Address of the sender's node for the engines' nodes."""
    on_gpus: bool = False
    """Whether buckets are in the memory of GPUs: of trainers and engines that have their own, between which they are broadcast,
    or of the sender's, which engines on the same one map."""
    bucket_bytes: int = 0
    """Size of a bucket; 0: the default of the device."""
    sends_deltas: bool = False
    """Whether updates are deltas from the last one, see :mod:`~.deltas`."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Proves to the sender that a connection comes from an engine of this run."""

    @property
    def size(self) -> int:
        """Bytes of a bucket."""
        return self.bucket_bytes or (GPU_BUCKET_BYTES if self.on_gpus else BUCKET_BYTES)


def gpu_bucket_bytes(free: Sequence[int]) -> int:
    """Size of a bucket on GPUs with so many bytes of free memory each: at most a GiB, and at least that of a CPU."""
    fits = min(free) // (FREE_MEMORY_DIVISOR * BUFFERS)
    return max(BUCKET_BYTES, min(GPU_BUCKET_BYTES, fits >> 20 << 20))


def free_gpu_memory() -> int:
    """Bytes of this process's GPU that no process uses."""
    import torch

    return torch.cuda.mem_get_info()[0]


def _transport(channel: Channel, peers: Peers, is_sender: bool) -> Transport:
    if channel.kind == "memory" and channel.on_gpus:
        return GpuMemory(peers, is_sender, channel.size, BUFFERS)
    if channel.kind == "memory":
        return SharedMemory(peers, is_sender, channel.size, BUFFERS)
    return Broadcast(peers, is_sender, channel.size, BUFFERS, channel.host, channel.on_gpus)


class Sender:
    """Sends all weights to all receivers, as often as wanted. After a failure it is closed."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        address: Address = f"\0alignment-{secrets.token_hex(16)}" if channel.kind == "memory" else (channel.host, 0)
        self._listener = Listener(address, channel.receivers, channel.key)
        self.address = self._listener.address
        """Where receivers connect."""
        self._peers: Peers | None = None
        self._transport: Transport | None = None
        self._layouts: list[Layout] = []
        """Those that the receivers know, by the number of the bucket in an update."""
        self._encoder = DeltaEncoder() if channel.sends_deltas else None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send these weights; returns once all receivers have loaded them.

        Raises PeerFailed if one of them fails or dies, and DeadlineExceeded. If ``weights`` raise, receivers end, too.
        """
        try:
            if self._peers is None:
                self._peers = Peers(self._listener.connections(), "an engine", self.channel.seconds)
            if self._transport is None:
                self._transport = _transport(self.channel, self._peers, is_sender=True)
            self._transport.begin()
            if self._encoder is not None:
                weights = self._encoder.encode(weights, self._peers.receive())
            self._send(weights, self._peers, self._transport)
            self._transport.end()
            self._peers.send(None)
        except BaseException as error:
            if self._peers is not None:
                self._peers.fail(error)
            self.close()
            raise

    def _send(self, weights: Iterable[tuple[str, Tensor]], peers: Peers, transport: Transport) -> None:
        unread = 0  # buckets that some receiver has not copied yet
        number = 0

        def next_buffer() -> Tensor:
            nonlocal unread
            if unread == BUFFERS:
                transport.finish()
                peers.receive()
                unread -= 1
            return transport.buffers[number % BUFFERS]

        for layout, buffer in fill_buckets(weights, next_buffer):
            is_known = number < len(self._layouts) and self._layouts[number] == layout
            self._layouts[number : number + 1] = [layout]
            transport.written(buffer)
            peers.send({"number": number, "size": len(buffer), "layout": None if is_known else layout})
            transport.start(buffer)
            number += 1
            unread += 1
        peers.send(None)
        transport.finish()
        for _ in range(unread + 1):  # and that they have loaded all
            peers.receive()

    def close(self) -> None:
        """Close the channel, which receivers notice at their next wait."""
        self._listener.close()
        if self._transport is not None:
            self._transport.close()


class Receiver:
    """Receives all weights, as often as the sender sends them. After a failure it is closed."""

    def __init__(self, channel: Channel, address: Address) -> None:
        """Connect to the sender at its ``address``."""
        self.channel = channel
        self._peers = Peers([connect(address, channel.key)], "the trainer", channel.seconds)
        self._transport: Transport | None = None
        self._layouts: list[Layout] = []
        self._decoder = DeltaDecoder() if channel.sends_deltas else None

    @contextmanager
    def receiving(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """All weights of one update, each in memory of its own. The sender waits for the end of this context.

        An error in it ends the sender's wait. Raises PeerFailed if the sender fails or dies, and DeadlineExceeded.
        """
        try:
            if self._transport is None:
                self._transport = _transport(self.channel, self._peers, is_sender=False)
            self._transport.begin()
            weights = self._weights(self._transport)
            if self._decoder is not None:
                self._peers.send(self._decoder.begin())
                weights = self._decoder.decode(weights)
            yield weights
            for _ in weights:
                pass  # those that were not asked for
            self._transport.end()
            self._peers.send(None)
            self._peers.receive()  # all other receivers have loaded them, too
        except BaseException as error:
            self._peers.fail(error)
            self.close()
            raise

    def _weights(self, transport: Transport) -> Iterator[tuple[str, Tensor]]:
        assembler = Assembler()
        while (message := self._peers.receive()[0]) is not None:
            number = message["number"]
            if message["layout"] is not None:
                layout = [Slice._make([*part[:2], tuple(part[2]), *part[3:]]) for part in message["layout"]]
                self._layouts[number : number + 1] = [layout]
            buffer = transport.buffers[number % BUFFERS][: message["size"]]
            transport.start(buffer)
            transport.finish()
            complete = list(assembler.add(self._layouts[number], buffer))
            transport.read()
            self._peers.send(None)  # the buffer may be filled again
            yield from complete
            del complete  # its memory is there for the next bucket's tensors

    def close(self) -> None:
        """Close the channel."""
        if self._transport is not None:
            self._transport.close()
        self._peers.close()
