"""The memory of tensors, as PyTorch makes and frees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorMemory(TorchDispatchMode):
    """The bytes of the tensors that are made meanwhile: those in memory now, and the most at a time."""

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        """``existing`` tensors are not counted, nor views of them."""
        super().__init__()
        self.bytes = self.most = 0
        self.storages = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor | tuple):
            for tensor in (result,) if isinstance(result, torch.Tensor) else result:
                self._count(tensor)
        return result

    def _count(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if (name := storage._cdata) not in self.storages:
            self.storages.add(name)
            self._add(size := storage.nbytes())
            weakref.finalize(storage, lambda: (self.storages.remove(name), self._add(-size)))

    def _add(self, size: int) -> None:
        self.bytes += size
        self.most = max(self.most, self.bytes)
