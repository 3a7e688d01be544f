"""Weight updates as deltas: of each tensor only the elements whose bits changed since the last update.

Both sides keep the last update in CPU memory. The receiver updates its copy and hands on whole tensors, so that engines load
the same bits as without deltas. An item of an encoded stream is a tensor whose name begins with its kind: ``whole:NAME``,
``delta:NAME`` or, as the last one of an update, ``version:VERSION``. A delta, [N] uint8, has three parts:

* the checksum of the tensor before it, 8 bytes;
* the new values of K elements;
* the distance of each from the one before, 2 bytes. The first counts from −1.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from alignment_core.errors import PeerFailed

if TYPE_CHECKING:
    from torch import Tensor

GREATEST_GAP = 2**15 - 1
"""Greatest distance between elements of a delta, an int16. A delta has at least every element at a multiple of it."""
CHECKSUM_BYTES, GAP_BYTES = 8, 2
"""Bytes of a checksum, and of a distance."""


class DeltaEncoder:
    """The sender's side. It keeps a copy of the tensors that it sent last."""

    def __init__(self) -> None:
        self.version: str | None = None
        """Of the last complete update."""
        self._sent: dict[str, Tensor] = {}

    def encode(
        self, weights: Iterable[tuple[str, Tensor]], versions: Sequence[str | None]
    ) -> Iterator[tuple[str, Tensor]]:
        """The items of an update for receivers that hold these ``versions``: if any of them holds another version than the
        last one, all tensors are whole."""
        import torch

        all_have_last = self.version is not None and all(version == self.version for version in versions)
        last = self._sent if all_have_last else {}
        self.version = None
        self._sent = {}
        for name, tensor in weights:
            base = last.pop(name, None)
            delta = None if base is None else make_delta(base, tensor)
            if base is None or delta is None:
                self._sent[name] = _copied(tensor)
                yield f"whole:{name}", tensor
            else:
                self._sent[name] = base
                yield f"delta:{name}", delta
        self.version = secrets.token_hex(8)
        yield f"version:{self.version}", torch.empty(0, dtype=torch.uint8)


class DeltaDecoder:
    """A receiver's side. It keeps a copy of the tensors that it received last."""

    def __init__(self) -> None:
        self.version: str | None = None
        """Of the last complete update; None after an incomplete one."""
        self._base: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}
        """Those of the current update."""

    def begin(self) -> str | None:
        """Begin an update; returns the version of the last one, if it was complete."""
        version, self.version = self.version, None
        self._received = {}
        return version

    def decode(self, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, each in memory of its own, on the device of its item. The items of an update may come in several
        calls.

        Raises PeerFailed if a delta was made from other bits than those of the last update.
        """
        for item, tensor in items:
            kind, _, name = item.partition(":")
            if kind == "version":
                self.version = name
                self._base = self._received
                self._received = {}
            elif kind == "whole":
                self._base.pop(name, None)
                self._received[name] = _copied(tensor)
                yield name, tensor
            else:
                base = self._base.pop(name)
                apply_delta(name, base, tensor)
                self._received[name] = base
                yield name, base.to(tensor.device, copy=True)


def make_delta(base: Tensor, tensor: Tensor) -> Tensor | None:
    """A delta from ``base`` to ``tensor``, [N] uint8; ``base`` then has the bits of ``tensor``. None, and ``base`` stays as it
    is, if the delta is not smaller than ``tensor`` or the two differ in shape or type."""
    import torch

    if base.shape != tensor.shape or base.dtype != tensor.dtype:
        return None
    new = _bits(tensor)
    is_sent = new != _bits(base).to(new.device)
    is_sent[GREATEST_GAP - 1 :: GREATEST_GAP] = True
    count = int(is_sent.count_nonzero())  # nonzero takes 8 bytes of the tensor's device for each
    if CHECKSUM_BYTES + count * (GAP_BYTES + tensor.itemsize) >= tensor.nbytes:
        return None
    places_K = is_sent.nonzero().view(-1)
    values_K = new[places_K].cpu()
    places_K = places_K.cpu()
    gaps_K = places_K.diff(prepend=torch.tensor([-1])).to(torch.int16)
    before = checksum(base)
    _bits(base)[places_K] = values_K
    return torch.cat([part.view(torch.uint8) for part in (before.view(1), values_K, gaps_K)])


def apply_delta(name: str, base: Tensor, delta: Tensor) -> None:
    """Give ``base`` the bits of the tensor that ``delta`` was made for. Raises PeerFailed if it was made from other bits."""
    import torch

    delta = delta.cpu()
    if checksum(base) != delta[:CHECKSUM_BYTES].view(torch.int64)[0]:
        raise PeerFailed(
            f"the engine's copy of {name} is not the one that the trainer has; the next attempt sends all weights "
            "(resources.weight_update_mode: full always does)"
        )
    count = (len(delta) - CHECKSUM_BYTES) // (GAP_BYTES + base.itemsize)
    # Copies, because a view as a larger type has to begin at a multiple of its size.
    gaps_K = delta[len(delta) - count * GAP_BYTES :].clone().view(torch.int16)
    values_K = delta[CHECKSUM_BYTES : CHECKSUM_BYTES + count * base.itemsize].clone()
    bits = _bits(base)
    bits[gaps_K.cumsum(0, dtype=torch.int64) - 1] = values_K.view(bits.dtype)


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bytes, eight at a time, modulo 2⁶⁴: [] int64. It is contiguous and has a storage of its own."""
    import torch

    data = tensor.view(-1).view(torch.uint8)
    end = len(data) // 8 * 8
    return data[:end].view(torch.int64).sum() + data[end:].sum()


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers of their size, in its memory if it is contiguous: [N]."""
    import torch

    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(of_size[tensor.itemsize])


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy in CPU memory."""
    return tensor.detach().contiguous().to("cpu", copy=True)
