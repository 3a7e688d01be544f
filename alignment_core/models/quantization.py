"""QLoRA's frozen weights: linear layers in 4 bits, by ``bitsandbytes``.

Each block of 64 weights is stored as a scale times one of sixteen values, chosen for normally distributed weights (NF4), and
the scales of 256 blocks are quantized to 8 bits. Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
"""

from __future__ import annotations

import importlib.util
from math import prod
from typing import TYPE_CHECKING, Any

from alignment_core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FIELD = "training.lora.load_in_4bit"
STATE = ".weight."
"""Infix in the names of a weight's scales in a ``state_dict``: ``layer.weight.absmax``."""


def quantise(model: Any, head: nn.Module) -> None:
    """Quantize the linear layers of ``model`` other than ``head`` to 4 bits, on the CPU, so that every device computes with the
    same numbers. Experts of a mixture that ``transformers`` keeps in one tensor stay as they are.

    Raises UserError if ``bitsandbytes`` does not load, or the model has no such layer.
    """
    bitsandbytes = library().nn
    for name in _layers(model, head):
        layer = model.get_submodule(name)
        options = {"compute_dtype": layer.weight.dtype, "quant_type": "nf4", "device": "meta"}
        small = bitsandbytes.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, **options)
        # Some processors would compute in bfloat16 without gradients and in another type with them.
        small.support_avx512bf16_for_cpu = False
        small.weight = bitsandbytes.Params4bit(layer.weight.data, quant_type="nf4", module=small).to("cpu")
        small.bias = layer.bias
        model.set_submodule(name, small)
    model.is_loaded_in_4bit = True  # by this PEFT chooses its layers for 4 bits


def round_to_4_bits(model: Any, head: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights that :func:`quantise` would quantize, converted to ``dtype`` first, to 4 bits; they stay plain
    tensors."""
    functional = library().functional
    for name in _layers(model, head):
        weight = model.get_submodule(name).weight.data
        weight.copy_(
            functional.dequantize_4bit(
                *functional.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
            )
        )


def _layers(model: nn.Module, head: nn.Module) -> list[str]:
    from torch import nn

    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if not layers:
        raise UserError(f"{FIELD}: this model has no linear layer apart from its head; train all of its weights")
    return layers


def check_installed(field: str = FIELD) -> None:
    """Raise UserError if ``bitsandbytes``, which ``field`` needs, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{field}: the package bitsandbytes is not installed; install the extra: pip install 'alignment[qlora]'"
        )


def library(field: str = FIELD) -> Any:
    """The package ``bitsandbytes``, which ``field`` needs. Raises UserError if it does not load."""
    check_installed(field)
    import bitsandbytes

    if isinstance(bitsandbytes.cextension.lib, bitsandbytes.cextension.ErrorHandlerMockBNBNativeLibrary):
        raise UserError(
            f"{field}: bitsandbytes has no library for this machine, see `python -m bitsandbytes`; leave the field out"
        )
    return bitsandbytes


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is a layer in 4 bits."""
    return hasattr(getattr(module, "weight", None), "quant_state")


def plain_weight(module: nn.Module) -> Tensor:
    """The dequantized weights of a layer in 4 bits, in their original type, on the layer's device."""
    import bitsandbytes

    weight: Any = module.weight
    plain: Tensor = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    return plain


def size(parameter: Any) -> int:
    """Number of elements of a parameter, also of one in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return prod(state.shape) if state else int(parameter.numel())


def item_bytes(parameter: Any) -> int:
    """Bytes of one element, after dequantization."""
    state = getattr(parameter, "quant_state", None)
    return int(state.dtype.itemsize if state else parameter.element_size())
