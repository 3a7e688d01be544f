"""The weights of a model in buckets, for engines that get the policy's new weights while it trains.

Buckets travel through the shared memory of a machine's actors, which is small. None is larger than a given size, so a large
tensor, such as the embedding of a real vocabulary, is split over several.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alignment_core.models.adapters import adapters_of, merged, plain_names, tensor_of
from alignment_core.models.quantization import item_bytes
from alignment_core.models.quantization import size as numbers_of

if TYPE_CHECKING:
    from torch import Tensor, nn


class BucketSpec(NamedTuple):
    """The contents of one bucket: weights, or one of several parts of a weight that is too large for one bucket."""

    names: tuple[str, ...]
    number: int = 0
    parts: int = 1


class Piece(NamedTuple):
    """A weight, or a part of one, by its name in a checkpoint."""

    name: str
    dtype: str
    """Name of the type in torch."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    first: int
    """Index of the first of ``numbers`` in the whole weight, flattened."""
    numbers: np.ndarray
    """[N] A bfloat16 weight is viewed as uint16."""


Bucket = Sequence[Piece]
BUCKET_BYTES = 32 << 20
"""Most bytes of one bucket."""


def plan(model: nn.Module, size: int = BUCKET_BYTES) -> list[BucketSpec]:
    """The parameters and saved buffers by bucket of at most ``size`` bytes; a tied parameter is named once.

    A bias by which routers choose experts is a buffer here and a parameter in vLLM.

    Adapters are not named: they are merged into the weights that they belong to.
    """
    specs: list[BucketSpec] = []
    room = 0
    for name in plain_names(model):
        tensor = tensor_of(model, name)
        needed = (getattr(tensor, "ds_numel", 0) or numbers_of(tensor)) * item_bytes(model, name)
        if needed > size:
            parts = -(-needed // size)
            specs += [BucketSpec((name,), number, parts) for number in range(parts)]
            room = 0
        elif needed > room:
            specs.append(BucketSpec((name,)))
            room = size - needed
        else:
            specs[-1] = BucketSpec((*specs[-1].names, name))
            room -= needed
    return specs


class Sender:
    """Makes the buckets of a plan. Call it on every rank at once: with ZeRO 3 each holds a part of each weight."""

    def __init__(self, model: Any, rank: int, zero_stage: int) -> None:
        self.model = model
        self.rank = rank
        self.zero_stage = zero_stage
        self._names: tuple[str, ...] = ()
        self._whole: Bucket = ()
        """The whole weights of these parameters, kept between the buckets that hold parts of them."""

    def bucket(self, spec: BucketSpec, merge: bool = True) -> Bucket:
        """These weights under their names in a checkpoint; empty on ranks other than 0. With ``merge`` adapters are merged
        in."""
        if spec.number == 0 or spec.names != self._names:
            self._names = spec.names
            self._whole = self._gathered(spec.names, merge)
        bucket = _part(self._whole, spec.number, spec.parts)
        if spec.number == spec.parts - 1:
            self._names = ()
            self._whole = ()
        return bucket

    def _gathered(self, names: Sequence[str], merge: bool) -> Bucket:
        from transformers.core_model_loading import revert_weight_conversion

        chosen = {
            name: tensor_of(self.model, name) for name in [*names, *(adapters_of(self.model, names) if merge else ())]
        }
        whole: Any = contextlib.nullcontext()
        if self.zero_stage == 3:
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(list(chosen.values()))
        with whole:
            if self.rank != 0:
                return ()
            plain = {
                name: tensor.data.clone() if self.zero_stage == 3 else tensor.data for name, tensor in chosen.items()
            }
            weights = revert_weight_conversion(self.model, merged(self.model, plain))
            return [_piece(name, tensor) for name, tensor in weights.items()]


def _piece(name: str, tensor: Tensor) -> Piece:
    import torch

    plain = tensor.cpu().contiguous()
    numbers = plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain
    return Piece(name, str(plain.dtype).removeprefix("torch."), tuple(plain.shape), 0, numbers.numpy().reshape(-1))


def _part(whole: Bucket, number: int, parts: int) -> Bucket:
    """Part ``number`` of the bytes in ``whole``, one weight after the other, cut between two numbers."""
    total = sum(piece.numbers.nbytes for piece in whole)
    begin = total * number // parts
    end = total * (number + 1) // parts
    before = 0
    pieces = []
    for piece in whole:
        size = piece.numbers.itemsize
        count = len(piece.numbers)
        first, last = (min(max(-(-(place - before) // size), 0), count) for place in (begin, end))  # rounded up
        if first < last or parts == 1:
            pieces.append(piece._replace(first=first, numbers=piece.numbers[first:last]))
        before += piece.numbers.nbytes
    return pieces


class Receiver:
    """Puts weights together that come in several buckets."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Tensor, int]] = {}
        """Incomplete weights, flattened, and how many of their numbers are missing."""

    def add(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The weights that are complete now. They may lie in the bucket's own memory, which is shared: do not write to them."""
        import torch

        complete = []
        for piece in bucket:
            dtype = getattr(torch, piece.dtype)
            size = math.prod(piece.shape)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that it has no read-only tensors
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
            complete.append((piece.name, numbers.reshape(piece.shape)))
        return complete
