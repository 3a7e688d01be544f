"""How a channel moves its bytes: the interface of each kind of channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Transport:
    """Buffers on one side of a channel: the sender fills one while the receivers read the other. A kind of channel does what
    it needs at these moments, and nothing at the others."""

    buffers: list[Tensor]
    """[bucket_bytes] uint8 each, during an update."""

    def begin(self) -> None:
        """Prepare for an update, which all sides do at once."""

    def written(self, buffer: Tensor) -> None:
        """Called when the sender has filled the start of a buffer, before it notifies the receivers."""

    def start(self, buffer: Tensor) -> None:
        """Begin to transfer these bytes, or to receive into them."""

    def finish(self) -> None:
        """Wait until the transfers that have begun are over."""

    def read(self) -> None:
        """Wait until this receiver has finished reading a buffer, so that the sender may fill it again."""

    def end(self) -> None:
        """Free what only an update needs, after all have loaded the weights."""

    def close(self) -> None:
        """Free everything."""
