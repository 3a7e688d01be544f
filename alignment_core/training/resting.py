"""Trainers that rest: their memory on GPUs moves to that of the CPU while engines on the same GPUs sample, and back."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from alignment_core.errors import EnvironmentFault

SLAB_BYTES = 256 << 20
"""CPU memory is pinned in slabs of this size, because PyTorch rounds each pinned tensor up to a power of two."""
_OUTSIDE = (type, types.ModuleType, types.CodeType, types.FrameType)
"""Objects that lead from a trainer to those of the whole process."""
_PARTS = ("ds_tensor", "ds_secondary_tensor")
"""Attributes of a parameter with parts of it at ZeRO stage 3, that of ZeRO++ within a node too."""
_SCALES = ("quant_state", "SCB")
"""Attributes of a quantized weight."""


class Resting:
    """The tensors of some models with their optimisers: in the memory of a device or, while they rest, of the CPU.

    Storages are emptied and filled again in place, so that tensors, their views and all references to them stay valid.
    DeepSpeed's ``offload_states`` moves fewer of its tensors, and at ZeRO stage 3 requires its own optimiser.
    """

    def __init__(self, of: object, device: str) -> None:
        """``of``: what leads to all of them, such as learners."""
        self.of = of
        self.device = torch.device(device)
        self._resting: list[tuple[UntypedStorage, int]] = []
        """Storages that are empty now, and their sizes in bytes, in the order in which their contents are in the slabs."""
        self._slabs: list[Tensor] = []

    def rest(self, keep: Iterable[UntypedStorage] = ()) -> None:
        """Move all memory to the CPU that is on the device, but for ``keep``. Until :meth:`wake` nothing may read or write it.

        Raises EnvironmentFault, and leaves it where it is, if the CPU has no room.
        """
        kept = {storage.data_ptr() for storage in keep}
        storages = [
            (storage, storage.nbytes())
            for storage in storages_of(self.of, self.device)
            if storage.resizable() and storage.data_ptr() not in kept
        ]
        start = sum(size for _, size in self._resting)
        self._synchronize()  # with other streams, too
        for storage, size in storages:
            for on_device, on_cpu in self._pieces(storage, start):
                on_cpu.copy_(on_device, non_blocking=True)
            start += size
        self._synchronize()
        for storage, _ in storages:
            storage.resize_(0)
        self._resting += storages
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move everything back to the device."""
        start = sum(size for _, size in self._resting)
        for storage, size in reversed(self._resting):
            start -= size
            storage.resize_(size)
            for on_device, on_cpu in self._pieces(storage, start):
                on_device.copy_(on_cpu, non_blocking=True)
        self._synchronize()
        self._resting = []

    def check_awake(self) -> None:
        """Raise RuntimeError while it rests: the memory of its tensors is not there."""
        if self._resting:
            raise RuntimeError("the models rest in CPU memory, and must wake first")

    def close(self) -> None:
        """Free the CPU memory."""
        self._slabs = []
        if self.device.type == "cuda":
            torch.accelerator.empty_host_cache()

    def _pieces(self, storage: UntypedStorage, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of a storage, and their places in the slabs from the byte ``start`` on, piece by piece."""
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < len(whole):
            number, first = divmod(start + done, SLAB_BYTES)
            if number == len(self._slabs):
                self._slabs.append(self._new_slab())
            piece = self._slabs[number][first : first + len(whole) - done]
            yield whole[done : done + len(piece)], piece
            done += len(piece)

    def _new_slab(self) -> Tensor:
        try:
            return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            size = len(self._slabs) * SLAB_BYTES / (1 << 30)
            raise EnvironmentFault(
                f"resources.offload_while_sampling: only {size:.1f} GiB of CPU memory could be pinned for a trainer, which "
                "has more on its GPU; use a machine with more memory, or set it to false"
            ) from error

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def weight_storages(model: nn.Module) -> list[UntypedStorage]:
    """The memory of the weights and buffers of ``model``, with the scales of quantized ones: at ZeRO stage 3 of this rank's
    part of each, and of small ones that DeepSpeed keeps whole beside it."""
    storages: list[UntypedStorage] = []
    scales: list[object] = []
    for tensor in (*model.parameters(), *model.buffers()):
        parts: list[Any] = [tensor, *(getattr(tensor, name, None) for name in _PARTS)]
        parts += [getattr(part, "ds_quant_scale", None) for part in parts]
        storages += [part.untyped_storage() for part in parts if part is not None]
        scales += [getattr(tensor, name, None) for name in _SCALES]
    scales = [scale for scale in scales if scale is not None]
    return storages + (storages_of(scales, storages[0].device) if scales else [])


def storages_of(root: object, device: torch.device) -> list[UntypedStorage]:
    """The memory of all tensors that ``root`` leads to, on devices of the kind of ``device``: by attributes, containers,
    closures and hooks, but not by classes and the globals of modules."""
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)}
    reached: list[Any] = [root]
    seen = {id(root)} | namespaces
    storages: dict[int, UntypedStorage] = {}
    for thing in reached:  # which grows, and keeps objects that are made here: their ids are not used again
        referents = gc.get_referents(thing)
        if issubclass(type(thing), Tensor):  # not `isinstance`, which asks proxies for the class of another object
            storage = _storage(thing)
            if storage is not None and storage.device.type == device.type and storage.nbytes():
                storages[storage.data_ptr()] = storage
            if thing.is_leaf:
                referents.append(thing.grad)
        for referent in referents:
            if id(referent) not in seen and gc.is_tracked(referent) and not issubclass(type(referent), _OUTSIDE):
                seen.add(id(referent))
                reached.append(referent)
    return list(storages.values())


def _storage(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # such as sparse tensors, which have none
        return None
