"""Checkpoints that any number of ranks and any ZeRO stage go on from: whole weights and optimiser states, in safetensors.

DeepSpeed's own checkpoints are pickles, a file for each rank. In these, rank 0 writes what all ranks hold of each parameter
that trains: its fp32 weights and what the optimiser keeps of it. The same ranks go on to the same bytes; others differ in
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment_core.training.ema import WeightAverage, stepped_tensors, whole_tensors

FILE = "portable-{:05d}.safetensors"
FIRST = FILE.format(0)
AVERAGE = "average:"
"""Prefix of a moving average of the weights, beside them."""
_FILE_BYTES = 1 << 30
"""A file is written when so much has come together, so that no more than this is in memory twice."""
_WEIGHTS, _NUMBERS = "weights", "numbers"


@dataclass(frozen=True)
class _Held:
    """What this rank's optimiser holds of a parameter: a part of one of the tensors that it steps."""

    tensor: Tensor
    start: int
    """In the tensor."""
    at: int
    """In the flattened parameter."""
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor of the same shape."""
        return tensor.view(-1).narrow(0, self.start, self.size)


class Portable:
    """Reads and writes what a DeepSpeed engine trains. Its methods are collective."""

    def __init__(self, engine: Any, zero_stage: int) -> None:
        self.engine, self.zero_stage = engine, zero_stage
        self.rank = torch.distributed.get_rank()
        self._own = {} if zero_stage else whole_tensors(engine)

    def save(self, folder: Path, average: WeightAverage | None = None) -> None:
        """Write files below ``folder``, which exists: weights, optimiser, and the moving average of the weights."""
        kept = {f"{_NUMBERS}.{key}": one for key, one in self._numbers().items()}
        count = 0

        def keep(name: str, whole: Tensor) -> None:
            nonlocal count
            if self.rank == 0:
                kept[name] = whole.detach().cpu().contiguous().clone()
                if sum(one.nbytes for one in kept.values()) > _FILE_BYTES:
                    save_file(kept, folder / FILE.format(count))
                    kept.clear()
                    count += 1

        for name, parameter in self._trained():
            for key in (_WEIGHTS, *self._keys()):
                keep(f"{key}.{name}", self._whole(parameter, key))
        if average is not None:
            with average.in_place():
                for name, parameter in self._trained():
                    keep(f"{AVERAGE}{name}", self._whole(parameter, _WEIGHTS))
        if self.rank == 0:
            save_file(kept, folder / FILE.format(count))

    @torch.no_grad()
    def load(self, folder: Path, average: WeightAverage | None = None) -> None:
        """Read what :meth:`save` wrote, on however many ranks and at whatever stage."""
        parameters, numbers = dict(self._trained()), {}
        if average is not None:
            with average.in_place():
                for full, tensor in _stored(folder):
                    if full.startswith(AVERAGE):
                        self._put(parameters[full.removeprefix(AVERAGE)], _WEIGHTS, tensor)
        for full, tensor in _stored(folder):
            key, _, name = full.partition(".")
            if full.startswith(AVERAGE):
                continue
            if key == _NUMBERS:
                numbers[name] = tensor
            elif key == _WEIGHTS:
                self._put(parameters[name], key, tensor)
                self._show(parameters[name], tensor)
            else:
                self._put(parameters[name], key, tensor)
        fused = self.engine.basic_optimizer.defaults.get("fused")
        for one in stepped_tensors(self.engine, self.zero_stage) if numbers else ():
            place = one.device if fused else "cpu"
            state = self.engine.basic_optimizer.state[one]
            state.update({key: number.to(place, copy=True) for key, number in numbers.items()})

    # ---------------------------------------------------------------- inside

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self.engine.module.named_parameters() if one.requires_grad)

    def _keys(self) -> list[str]:
        """Of what the optimiser keeps of each parameter, after its first step."""
        found = {key for state in self.engine.basic_optimizer.state.values() for key, one in state.items() if one.dim()}
        return sorted(found)

    def _numbers(self) -> dict[str, Tensor]:
        """What it keeps beside that, equal for all parameters: the number of its steps."""
        states = self.engine.basic_optimizer.state.values()
        return {key: one.cpu().clone() for state in states for key, one in state.items() if one.dim() == 0}

    def _whole(self, parameter: nn.Parameter, key: str) -> Tensor:
        """The weights of a parameter, or what the optimiser keeps of them, put together from all ranks."""
        held = self._held(parameter)
        if self.zero_stage == 0:
            assert held is not None
            return held.tensor if key == _WEIGHTS else self.engine.basic_optimizer.state[held.tensor].get(key, _NONE)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=parameter.device)
        if held is not None:
            whole.narrow(0, held.at, held.size).copy_(held.of(self._tensor(held, key)))
        torch.distributed.all_reduce(whole)
        return whole.view(shape)

    def _put(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        held = self._held(parameter)
        if held is None or value.numel() == 0:
            return
        if self.zero_stage == 0 and key != _WEIGHTS:  # of any shape
            self.engine.basic_optimizer.state[held.tensor][key] = value.to(held.tensor.device, copy=True)
        else:
            held.of(self._tensor(held, key)).copy_(value.view(-1).narrow(0, held.at, held.size))

    def _tensor(self, held: _Held, key: str) -> Tensor:
        if key == _WEIGHTS:
            return held.tensor.data
        state = self.engine.basic_optimizer.state[held.tensor]
        if key not in state:
            state[key] = torch.zeros_like(held.tensor.data)
        return state[key]

    def _show(self, parameter: nn.Parameter, weights: Tensor) -> None:
        """Let the model compute with weights, in its own type."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_stage == 3):
            if self.zero_stage < 3 or self.rank == 0:
                parameter.data.copy_(weights)

    def _held(self, parameter: Any) -> _Held | None:
        optimizer = self.engine.optimizer
        if self.zero_stage == 0:
            tensor = self._own[id(parameter)]
            return _Held(tensor, 0, 0, tensor.numel())
        if self.zero_stage == 3:
            group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            at = size * self.rank  # the last part may be filled up behind
            size = max(0, min(size, parameter.ds_numel - at))
            return _Held(optimizer.fp32_partitioned_groups_flat[group], start, at, size) if size else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        inside, outside = mapping.hp_fragment_address, mapping.lp_fragment_address
        (tensor,) = self.engine.basic_optimizer.param_groups[mapping.param_group_index]["params"]
        return _Held(tensor, inside.start, outside.start, inside.numel)


_NONE = torch.empty(0)
"""Of a parameter of which the optimiser keeps nothing under a key, as Muon and AdamW share one."""


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("portable-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, opened.get_tensor(name)
