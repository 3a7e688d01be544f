"""The exponential moving average of a model's weights under DeepSpeed: each rank averages its optimiser's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment_core.models.tensor_parallel import gathered


class WeightAverage:
    """``average ← decay · average + (1 - decay) · weights`` after each optimiser step, in fp32; initially the weights.

    Under ZeRO a rank's optimiser holds a part of the weights (all of them at stage 0), in fp32 whatever the model's type.
    """

    def __init__(self, engine: Any, zero_stage: int, decay: float) -> None:
        self.engine = engine
        self.zero_stage = zero_stage
        self.decay = decay
        self.parts = [part.detach().clone() for part in self._weights()]

    def _weights(self) -> list[Tensor]:
        return stepped_tensors(self.engine, self.zero_stage)

    @torch.no_grad()
    def update(self) -> None:
        """Include the weights after a step."""
        for part, weights in zip(self.parts, self._weights(), strict=True):
            part.lerp_(weights, 1 - self.decay)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """Every weight of ``module`` by name, averaged, in its own type; collective, empty on ranks other than 0."""
        first = torch.distributed.get_rank() == 0
        weights: dict[str, Tensor] = {}
        full = full_fp32(self.engine, self.zero_stage)
        with self.in_place():
            for name, parameter in module.named_parameters():
                frozen = not parameter.requires_grad  # the optimiser does not hold it
                with whole_parameter(parameter, self.zero_stage if frozen else 0):
                    whole = gathered(parameter, parameter.detach() if frozen else full(parameter))
                    if first:
                        weights[name] = whole.detach().to(parameter.dtype, copy=True).cpu()
        persistent = module.state_dict(keep_vars=True).keys()
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        return {**weights, **buffers} if first else {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this context the average takes the place of the weights, so that DeepSpeed's functions gather the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for part, weights in zip(self.parts, self._weights(), strict=True):
            before = weights.clone()
            weights.copy_(part)
            part.copy_(before)

    def save(self, target: Path) -> None:
        """Write this rank's part below ``target``, which exists."""
        from safetensors.torch import save_file

        save_file({str(number): part.contiguous() for number, part in enumerate(self.parts)}, self._file(target))

    def restore(self, target: Path) -> None:
        """Read the output of :meth:`save`."""
        from safetensors.torch import load_file

        stored = load_file(self._file(target))
        for number, part in enumerate(self.parts):
            part.copy_(stored[str(number)])

    def _file(self, target: Path) -> Path:
        return target / f"average-{torch.distributed.get_rank():05d}.safetensors"


def stepped_tensors(engine: Any, zero_stage: int) -> list[Tensor]:
    """The tensors that this rank's optimiser steps."""
    if zero_stage == 3:  # DeepSpeed puts them into `param_groups` only during a step
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [part for group in engine.basic_optimizer.param_groups for part in group["params"]]


def whole_tensors(engine: Any) -> dict[int, Tensor]:
    """For ZeRO stage 0: the optimiser's tensor of each parameter, by its ``id``; in fp32 that is the parameter itself."""
    weights = stepped_tensors(engine, 0)
    groups = getattr(engine.optimizer, "fp16_groups", [weights])  # DeepSpeed's name, also in bf16
    parameters = (parameter for group in groups for parameter in group)
    return {id(parameter): weight for parameter, weight in zip(parameters, weights, strict=True)}


def full_fp32(engine: Any, zero_stage: int) -> Callable[[nn.Parameter], Tensor]:
    """A function that returns the whole of a trained parameter as the optimiser holds it, in fp32; of one that several ranks
    share, this rank's part. Collective under ZeRO."""
    from deepspeed.utils import safe_get_full_fp32_param

    if zero_stage:
        return lambda parameter: safe_get_full_fp32_param(parameter).detach()
    tensors = whole_tensors(engine)
    return lambda parameter: tensors[id(parameter)].detach()


def part_fp32(engine: Any, parameter: nn.Parameter) -> Tensor:
    """At ZeRO stage 3, this rank's part of a trained parameter in fp32, as the optimiser holds it: flattened and padded."""
    optimizer = engine.optimizer
    group, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    part: Tensor = optimizer.fp32_partitioned_groups_flat[group].narrow(0, start, size)
    return part.detach()


def whole_parameter(parameter: nn.Parameter, zero_stage: int) -> Any:
    """The context in which a parameter is whole on every rank, in the model's type."""
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([parameter], enabled=zero_stage == 3)
