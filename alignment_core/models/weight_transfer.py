"""The weights of a model under their names in a checkpoint, for engines that follow a policy in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from alignment_core.models.adapters import adapters_of, merged, plain_names, tensor_of
from alignment_core.models.quantization import item_bytes
from alignment_core.models.quantization import size as numbers_of
from alignment_core.models.tensor_parallel import gathered, ranks_of

if TYPE_CHECKING:
    from torch import Tensor, nn

GATHERED_BYTES = 32 << 20
"""Most bytes of weights, of which ranks hold parts, that one holds whole at a time, unless a single one is larger."""


def groups_of(model: nn.Module, size: int = GATHERED_BYTES) -> list[tuple[str, ...]]:
    """The parameters and saved buffers in groups of at most ``size`` bytes, or of one; a tied parameter is named once.

    A bias by which routers choose experts is a buffer here and a parameter in vLLM.

    Adapters are not named: they are merged into the weights that they belong to.
    """
    groups: list[tuple[str, ...]] = []
    room = 0
    for name in plain_names(model):
        tensor = tensor_of(model, name)
        needed = (getattr(tensor, "ds_numel", 0) or numbers_of(tensor)) * ranks_of(tensor) * item_bytes(model, name)
        if groups and needed <= room:
            groups[-1] = (*groups[-1], name)
            room -= needed
        else:
            groups.append((name,))
            room = size - needed
    return groups


class WeightStream:
    """Reads all weights of a model, as often as wanted. Use it on every rank at once: each may hold a part of each weight."""

    def __init__(self, model: Any, rank: int, zero_stage: int, size: int = GATHERED_BYTES) -> None:
        """``size`` is that of :func:`groups_of`."""
        self.model = model
        self.rank = rank
        self.zero_stage = zero_stage
        self.groups = groups_of(model, size)

    def tensors(self, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Names in a checkpoint and weights, which are the model's own where that is possible: do not write to them. Nothing on
        ranks other than 0, which must iterate, too. With ``merge`` adapters are merged in."""
        for names in self.groups:
            yield from self._gathered(names, merge).items()

    def _gathered(self, names: Sequence[str], merge: bool) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        chosen = {
            name: tensor_of(self.model, name) for name in [*names, *(adapters_of(self.model, names) if merge else ())]
        }
        whole: Any = contextlib.nullcontext()
        if self.zero_stage == 3:
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(list(chosen.values()))
        with whole:
            plain = {name: gathered(tensor, tensor.data) for name, tensor in chosen.items()}
            if self.rank != 0:
                return {}
            if self.zero_stage == 3:
                plain = {name: tensor.clone() for name, tensor in plain.items()}
            weights: dict[str, Tensor] = revert_weight_conversion(self.model, merged(self.model, plain))
            return weights
