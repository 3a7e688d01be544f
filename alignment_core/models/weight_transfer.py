"""The weights of a model in buckets, for engines that follow a policy while it trains.

Buckets travel through memory that the actors of a machine share, of which there is little: none is larger than asked for,
so that a large tensor, such as the embedding of a real vocabulary, comes in several.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alignment_core.models.adapters import adapters_of, merged, plain_names
from alignment_core.models.quantization import item_bytes
from alignment_core.models.quantization import size as numbers_of

if TYPE_CHECKING:
    from torch import Tensor, nn


class Share(NamedTuple):
    """What one bucket is to hold: parameters, or one of several parts of a parameter that is too large for one."""

    names: tuple[str, ...]
    number: int = 0
    parts: int = 1


class Piece(NamedTuple):
    """A weight, or a part of one, by its name in a checkpoint."""

    name: str
    dtype: str
    """Of torch."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    first: int
    """Place of the first of ``numbers`` in the whole weight, as if that had one dimension."""
    numbers: np.ndarray
    """[N] Those of a bfloat16 weight are viewed as uint16."""


Bucket = Sequence[Piece]
BUCKET_BYTES = 32 << 20
"""Of one bucket at most: what a transfer takes of the memory that actors share."""


def plan(model: nn.Module, size: int = BUCKET_BYTES) -> list[Share]:
    """The parameters by bucket of at most ``size`` bytes, in the model's order; a tied one is named once.

    Adapters are not named: they travel within the weights that they belong to.
    """
    shares: list[Share] = []
    room = 0
    for name in plain_names(model):
        parameter = model.get_parameter(name)
        needed = (getattr(parameter, "ds_numel", 0) or numbers_of(parameter)) * item_bytes(parameter)
        if needed > size:
            parts = -(-needed // size)
            shares += [Share((name,), number, parts) for number in range(parts)]
            room = 0
        elif needed > room:
            shares.append(Share((name,)))
            room = size - needed
        else:
            shares[-1] = Share((*shares[-1].names, name))
            room -= needed
    return shares


class Sender:
    """Makes the buckets of a plan, on every rank at once: with ZeRO 3 each holds a part of each weight."""

    def __init__(self, model: Any, rank: int, zero_stage: int) -> None:
        self.model, self.rank, self.zero_stage = model, rank, zero_stage
        self._names: tuple[str, ...] = ()
        self._whole: Bucket = ()
        """Of these parameters, kept between the buckets that have a part of them."""

    def bucket(self, share: Share, merge: bool = True) -> Bucket:
        """These weights under the names that a checkpoint has them by; nothing on other ranks than 0. Adapters are merged in,
        unless the weights beside them are asked for."""
        if share.number == 0 or share.names != self._names:
            self._names, self._whole = share.names, self._gathered(share.names, merge)
        bucket = _part(self._whole, share.number, share.parts)
        if share.number == share.parts - 1:
            self._names, self._whole = (), ()
        return bucket

    def _gathered(self, names: Sequence[str], merge: bool) -> Bucket:
        from transformers.core_model_loading import revert_weight_conversion

        parameters = dict(self.model.named_parameters())
        chosen = {name: parameters[name] for name in [*names, *(adapters_of(self.model, names) if merge else ())]}
        whole: Any = contextlib.nullcontext()
        if self.zero_stage == 3:
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(list(chosen.values()))
        with whole:
            if self.rank != 0:
                return ()
            plain = {
                name: parameter.data.clone() if self.zero_stage == 3 else parameter.data
                for name, parameter in chosen.items()
            }
            weights = revert_weight_conversion(self.model, merged(self.model, plain))
            return [_piece(name, tensor) for name, tensor in weights.items()]


def _piece(name: str, tensor: Tensor) -> Piece:
    import torch

    plain = tensor.cpu().contiguous()
    numbers = plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain
    return Piece(name, str(plain.dtype).removeprefix("torch."), tuple(plain.shape), 0, numbers.numpy().reshape(-1))


def _part(whole: Bucket, number: int, parts: int) -> Bucket:
    """The bytes of part ``number`` of all in ``whole``, one weight after the other, cut between two numbers."""
    total, before, found = sum(piece.numbers.nbytes for piece in whole), 0, []
    begin, end = total * number // parts, total * (number + 1) // parts
    for piece in whole:
        size, most = piece.numbers.itemsize, len(piece.numbers)
        first, last = (min(max(-(-(place - before) // size), 0), most) for place in (begin, end))
        if first < last or parts == 1:
            found.append(piece._replace(first=first, numbers=piece.numbers[first:last]))
        before += piece.numbers.nbytes
    return found


class Receiver:
    """Puts together what comes in several buckets."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Tensor, int]] = {}
        """Weights of which something is missing, as one dimension, and how many numbers."""

    def take(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The weights that are whole now. They may lie in the bucket's own memory: it is shared, so only read them."""
        import torch

        found = []
        for piece in bucket:
            dtype, size = getattr(torch, piece.dtype), math.prod(piece.shape)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch knows no tensor that is only read
                numbers = torch.from_numpy(piece.numbers).view(dtype)
            if len(numbers) < size:
                if piece.name not in self._begun:
                    self._begun[piece.name] = torch.empty(size, dtype=dtype), size
                whole, missing = self._begun.pop(piece.name)
                whole[piece.first : piece.first + len(numbers)] = numbers
                if missing > len(numbers):
                    self._begun[piece.name] = whole, missing - len(numbers)
                    continue
                numbers = whole
            found.append((piece.name, numbers.reshape(piece.shape)))
        return found
