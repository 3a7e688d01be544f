"""The weights of a model in buckets, for engines that follow a policy while it trains."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.models.adapters import adapters_of, merged, plain_names

if TYPE_CHECKING:
    from torch import Tensor, nn

Bucket = Sequence[tuple[str, str, np.ndarray]]
"""Weights by their name in a checkpoint: (name, dtype of torch, array); a bfloat16 tensor comes as an array of uint16."""

BUCKET_BYTES = 32 << 20
"""Of one bucket, more where a single tensor is larger: what a transfer takes of the memory that actors share."""


def plan(model: nn.Module, size: int = BUCKET_BYTES) -> list[list[str]]:
    """Names of the parameters by bucket of ``size`` bytes, in the model's order; a tied one is named once.

    Adapters are not named: they travel within the weights that they belong to.
    """
    buckets: list[list[str]] = []
    room = 0
    for name in plain_names(model):
        parameter = model.get_parameter(name)
        needed = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if not buckets or needed > room:
            buckets.append([])
            room = size
        buckets[-1].append(name)
        room -= needed
    return buckets


def fill(model: Any, names: Sequence[str], rank: int, zero_stage: int) -> Bucket:
    """These parameters under the names that a checkpoint has them by, with adapters merged in; nothing on other ranks.

    Call it on every rank: with ZeRO 3 each holds a part of each.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name] for name in [*names, *adapters_of(model, names)]}
    whole: Any = contextlib.nullcontext()
    if zero_stage == 3:
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(list(chosen.values()))
    with whole:
        if rank != 0:
            return ()
        plain = {
            name: parameter.data.clone() if zero_stage == 3 else parameter.data for name, parameter in chosen.items()
        }
        return [
            (name, *_array(tensor)) for name, tensor in revert_weight_conversion(model, merged(model, plain)).items()
        ]


def tensors(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """What a bucket holds, over the arrays' own memory: it is shared, so only read it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no tensor that is only read
        return [(name, torch.from_numpy(array).view(getattr(torch, dtype))) for name, dtype, array in bucket]


def _array(tensor: Tensor) -> tuple[str, np.ndarray]:
    import torch

    plain = tensor.cpu().contiguous()
    numbers = plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain
    return str(plain.dtype).removeprefix("torch."), numbers.numpy()
