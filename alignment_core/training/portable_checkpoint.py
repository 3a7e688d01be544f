"""Checkpoints that resume on any number of ranks and any ZeRO stage: whole weights and optimiser states, in safetensors.

DeepSpeed's own checkpoints are pickles, one file per rank. For these, ranks gather each trained parameter's fp32 weights and
optimiser state, and write them side by side, each another part of them. On the same number of ranks a resumed run ends in the
same bytes; on another it differs by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment_core.models.adapters import adapters_of, is_adapter, merged, plain_name
from alignment_core.models.tensor_parallel import TensorGroup, gathered, own
from alignment_core.training.ema import WeightAverage, stepped_tensors, whole_tensors

FILE = "portable-{:05d}.safetensors"
AVERAGE = "average:"
"""Prefix of the moving average of a weight."""
_FILE_BYTES = 1 << 30
"""Size at which a file is written, because its tensors are in memory twice until then."""
_WEIGHTS = "weights"
_NUMBERS = "numbers"


@dataclass(frozen=True)
class _Part:
    """This rank's part of a parameter: a range of one of the tensors that its optimiser steps."""

    tensor: Tensor
    start: int
    """Start in the tensor."""
    at: int
    """Start in the flattened parameter."""
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same range of a tensor of the same shape."""
        return tensor.view(-1).narrow(0, self.start, self.size)


class Portable:
    """Reads and writes the trained state of a DeepSpeed engine. Its methods are collective."""

    def __init__(self, engine: Any, zero_stage: int, tensor_group: TensorGroup | None = None) -> None:
        """Each rank of the ``tensor_group`` has its part of the parameters."""
        self.engine = engine
        self.zero_stage = zero_stage
        self._peers = (tensor_group or TensorGroup()).peers
        self.rank = torch.distributed.get_rank()
        self._own = {} if zero_stage else whole_tensors(engine)

    def save(self, folder: Path, average: WeightAverage | None = None, optimizer: bool = True) -> None:
        """Write files below ``folder``: weights, optimiser, and the moving average of the weights. Without the optimiser they
        are an artifact, whose bytes do not depend on the number of ranks: rank 0 writes all of them."""
        numbers = self._numbers() if optimizer else {}
        files = _Files(folder, self.rank, torch.distributed.get_world_size() if optimizer else 1)
        for key, number in numbers.items():
            files.add(f"{_NUMBERS}.{key}", number)
        for name, parameter in self._trained():
            for key in (_WEIGHTS, *(self._keys() if optimizer else ())):
                files.add(f"{key}.{name}", self._whole(parameter, key))
        if average is not None:
            with average.in_place():
                for name, parameter in self._trained():
                    files.add(f"{AVERAGE}{name}", self._whole(parameter, _WEIGHTS))
        files.close()

    @torch.no_grad()
    def save_merged_masters(
        self, folder: Path | None, weights: Mapping[str, Tensor], start: Path | None
    ) -> dict[str, Tensor]:
        """Write master weights of a model with LoRA adapters to ``folder``, if one is given, in the form of :meth:`save`:
        W + (lora_alpha / r) B A in fp32, where W are the initial policy's master weights in the folder ``start`` or, if it
        has none, its weights. Master weights of modules that are trained whole are the optimiser's.

        ``weights`` are those of the model with adapters, needed on rank 0. Returns the weights that have adapters as they are
        in the merged model: their master weights rounded to its type. Empty on ranks other than 0.
        """
        model = self.engine.module
        files = _Files(folder, self.rank, writers=1)
        of_start = None if start is None else _files_by_tensor(start)
        rounded = {}
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                continue
            stored = f"{_WEIGHTS}.{plain_name(name)}"
            if parameter.requires_grad:
                files.add(stored, self._whole(parameter, _WEIGHTS))
            elif self.rank == 0:
                own = weights[name]
                master = own.float() if of_start is None else _read(of_start[stored], stored)
                if adapters := adapters_of(model, [name]):
                    parts = {part: weights[part] for part in adapters}
                    (master,) = merged(model, {name: master.to(own.device), **parts}).values()
                    rounded[plain_name(name)] = master.to(own.dtype)
                files.add(stored, master)
        files.close()
        return rounded

    @torch.no_grad()
    def load(self, folder: Path, average: WeightAverage | None = None) -> None:
        """Read the output of :meth:`save`, which any number of ranks at any ZeRO stage may have written."""
        parameters = dict(self._trained())
        numbers: dict[str, Tensor] = {}
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
                self._copy_to_model(parameters[name], tensor)
            else:
                self._put(parameters[name], key, tensor)
        fused = self.engine.basic_optimizer.defaults.get("fused")
        for tensor in stepped_tensors(self.engine, self.zero_stage) if numbers else ():
            device = tensor.device if fused else "cpu"  # torch keeps the number of steps on the CPU for other kernels
            state = self.engine.basic_optimizer.state[tensor]
            state.update({key: number.to(device, copy=True) for key, number in numbers.items()})

    @torch.no_grad()
    def load_masters(self, folder: Path) -> str | None:
        """Read the master weights of the model; those of weights that LoRA freezes are only checked. Returns, on every rank,
        the first weight of the model that is not its master weight rounded to the model's type; None if all are."""
        every = self.engine.module.named_parameters()
        parameters = {plain_name(name): parameter for name, parameter in every if not is_adapter(name)}
        for full, tensor in _stored(folder):
            name = full.removeprefix(f"{_WEIGHTS}.")
            parameter = parameters.pop(name, None)
            if parameter is None or not self._is_rounded(parameter, tensor):
                return name
            if parameter.requires_grad:
                self._put(parameter, _WEIGHTS, tensor)
        return next(iter(parameters), None)

    # ---------------------------------------------------------------- inside

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        parameters = self.engine.module.named_parameters()
        return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)

    def _keys(self) -> list[str]:
        """Names of the optimiser's state tensors, after its first step."""
        states = self.engine.basic_optimizer.state.values()
        return sorted({key for state in states for key, tensor in state.items() if tensor.dim()})

    def _numbers(self) -> dict[str, Tensor]:
        """The optimiser's scalars, equal for all parameters: the number of its steps."""
        states = self.engine.basic_optimizer.state.values()
        return {key: number.cpu().clone() for state in states for key, number in state.items() if number.dim() == 0}

    def _whole(self, parameter: nn.Parameter, key: str) -> Tensor:
        """The weights of a parameter, or a state tensor of the optimiser, gathered from all ranks."""
        return gathered(parameter, self._of_peers(parameter, key))

    def _of_peers(self, parameter: nn.Parameter, key: str) -> Tensor:
        """What the ranks that share no layers have of it together."""
        part = self._part(parameter)
        if self.zero_stage == 0:
            assert part is not None
            return part.tensor if key == _WEIGHTS else self.engine.basic_optimizer.state[part.tensor].get(key, _NONE)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        # Each rank fills in its own part, so that the sum over ranks is the whole. On the rank's device, wherever the part is:
        # NCCL sums no tensors in CPU memory.
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=self.engine.device)
        if part is not None:
            whole.narrow(0, part.at, part.size).copy_(part.of(self._tensor(part, key)))
        torch.distributed.all_reduce(whole, group=self._peers)
        return whole.view(shape)

    def _put(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        part = self._part(parameter)
        if part is None or value.numel() == 0:
            return
        value = own(parameter, value).contiguous()
        if self.zero_stage == 0 and key != _WEIGHTS:  # state tensors may have another shape than the parameter
            self.engine.basic_optimizer.state[part.tensor][key] = value.to(part.tensor.device, copy=True)
        else:
            part.of(self._tensor(part, key)).copy_(value.view(-1).narrow(0, part.at, part.size))

    def _tensor(self, part: _Part, key: str) -> Tensor:
        if key == _WEIGHTS:
            return part.tensor.data
        state = self.engine.basic_optimizer.state[part.tensor]
        if key not in state:
            state[key] = torch.zeros_like(part.tensor.data)
        return state[key]

    def _copy_to_model(self, parameter: nn.Parameter, weights: Tensor) -> None:
        """Copy weights into the model, in its own type."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero_stage == 3):
            if self.zero_stage < 3 or self.rank == 0:
                parameter.data.copy_(own(parameter, weights))

    def _is_rounded(self, parameter: nn.Parameter, weights: Tensor) -> bool:
        """Whether the model's weights are these, rounded to its type."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], enabled=self.zero_stage == 3):
            return torch.equal(gathered(parameter, parameter.data), weights.to(parameter.device, parameter.dtype))

    def _part(self, parameter: Any) -> _Part | None:
        optimizer = self.engine.optimizer
        if self.zero_stage == 0:
            tensor = self._own[id(parameter)]
            return _Part(tensor, 0, 0, tensor.numel())
        if self.zero_stage == 3:  # every parameter is cut into parts of one size
            group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            at = size * self.rank  # the last rank's part may be padded
            size = max(0, min(size, parameter.ds_numel - at))
            return _Part(optimizer.fp32_partitioned_groups_flat[group], start, at, size) if size else None
        mapping = parameter._hp_mapping  # made by DeepSpeed; None if this rank has no part of the parameter
        if mapping is None:
            return None
        inside, outside = mapping.hp_fragment_address, mapping.lp_fragment_address
        (tensor,) = self.engine.basic_optimizer.param_groups[mapping.param_group_index]["params"]
        return _Part(tensor, inside.start, outside.start, inside.numel)


_NONE = torch.empty(0)
"""State tensor of a parameter that has none under a key, as when Muon and AdamW share one optimiser."""


class _Files:
    """Writes tensors to files of about a gigabyte in a folder; None: nowhere. Of so many ``writers``, the one with the fewest
    bytes so far writes a tensor; they are the first ranks."""

    def __init__(self, folder: Path | None, rank: int, writers: int) -> None:
        self._folder = folder if rank < writers else None
        self._rank = rank
        self._bytes = [0] * writers
        self._tensors: dict[str, Tensor] = {}
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        writer = self._bytes.index(min(self._bytes))
        self._bytes[writer] += tensor.nbytes
        if self._folder and writer == self._rank:
            self._tensors[name] = tensor.detach().cpu().contiguous().clone()
            if sum(tensor.nbytes for tensor in self._tensors.values()) > _FILE_BYTES:
                self._write(self._folder)

    def close(self) -> None:
        """Write the last file, which may be empty."""
        if self._folder:
            self._write(self._folder)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # on another machine
        save_file(self._tensors, folder / FILE.format(self._count * len(self._bytes) + self._rank))
        self._tensors = {}
        self._count += 1


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    return ((name, _read(file, name)) for name, file in _files_by_tensor(folder).items())


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor in a folder."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("portable-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    return files


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor
