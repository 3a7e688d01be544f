"""Models of which each rank holds a part of every parameter, by DeepSpeed's ZeRO stage 3.

A model is loaded on the CPU, where its weights are pages of its files that all processes of a machine share, and is cut one
parameter at a time. So no rank ever holds more than its part and one parameter, and the device never holds a whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LINEAR = nn.functional.linear
"""That of PyTorch."""


def shard(module: nn.Module, dtype: torch.dtype, device: str, settings: Any) -> None:
    """Leave each rank its part of every parameter of ``module``, in ``dtype``, and move the buffers to the ``device``, in their
    own type. Collective; all ranks get the weights of rank 0.

    ``settings``: DeepSpeed's, of ZeRO stage 3. Optimisers must group their parameters before, because a parameter without its
    whole has one dimension and the shape (0,).
    """
    import deepspeed
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    LinearFunctionForZeroStage3.forward = staticmethod(_linear)
    parameters: list[Any] = [*module.parameters()]
    copied = _copied(parameters, dtype)
    # Not as a context of `from_pretrained`, which would compute rotary frequencies in bf16.
    deepspeed.zero.Init(module=nn.ParameterList([next(copied)]), config_dict_or_path=settings)
    parameters[0].convert_to_zero_parameters(param_list=copied)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def restore_linear() -> None:
    """Give later models of this process the linear layers of PyTorch again, which DeepSpeed replaces for all models at once."""
    nn.functional.linear = _LINEAR


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, H] → […, O], as PyTorch computes it. DeepSpeed's adds the bias in place: selective recomputation keeps products of
    matrices, would find the bias in them already, and would add it once more."""
    product = _LINEAR(states.reshape(-1, states.shape[-1]), weight, bias)
    return product.view(*states.shape[:-1], weight.shape[0])


def _copied(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Iterator[nn.Parameter]:
    """Each parameter when it is its turn, with its data in memory that the next one overwrites: memory of its own, once freed,
    would lie in holes between the parts."""
    types = [dtype if parameter.is_floating_point() else parameter.dtype for parameter in parameters]
    sizes = [parameter.numel() * kind.itemsize for parameter, kind in zip(parameters, types, strict=True)]
    memory = torch.empty(max(sizes), dtype=torch.uint8)
    for parameter, kind, size in zip(parameters, types, sizes, strict=True):
        data = memory[:size].view(kind).view(parameter.shape)
        parameter.data = data.copy_(parameter.data)
        yield parameter
