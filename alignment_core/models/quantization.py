"""Frozen weights in 4 or 8 bits, by ``bitsandbytes``: linear layers beside which LoRA adapters are trained.

4 bits (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs"): each block of 64 weights is stored as a scale
times one of sixteen values, chosen for normally distributed weights (NF4), and the scales of 256 blocks are in 8 bits.
8 bits (Dettmers et al. 2022, "LLM.int8()"): see :mod:`alignment_core.models.int8_linear`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from alignment_core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Bits = Literal[4, 8]


def field_of(bits: Bits) -> str:
    """The field that loads weights in so many bits."""
    return f"training.lora.load_in_{bits}bit"


def why_not_changed(name: str, shape: Mapping[str, Any]) -> str | None:
    """A sentence for the model ``name`` if its config.json (``shape``) says that its weights are stored quantized; else None.

    ``transformers`` loads some of them dequantized, and quantizes them again when it saves the model, without a word in the
    saved config.json. Others it cannot save.
    """
    stored = shape.get("quantization_config")
    if not stored:
        return None
    return (
        f"{name} has quantized weights ({stored.get('quant_method', 'quantization_config')} in its config.json), which are "
        "neither trained nor merged: name the unquantized model; `training.lora.load_in_4bit` quantizes that beside adapters"
    )


def quantise(model: Any, head: nn.Module, bits: Bits) -> None:
    """Quantize the linear layers of ``model`` other than ``head``, on the CPU, so that every device computes with the same
    numbers. Experts of a mixture that ``transformers`` keeps in one tensor stay as they are.

    Raises UserError if ``bitsandbytes`` does not load, or the model has no such layer.
    """
    for name in _layers(model, head, bits):
        layer = model.get_submodule(name)
        model.set_submodule(name, _quantised(layer, layer.weight.dtype, bits))
    setattr(model, f"is_loaded_in_{bits}bit", True)  # by this PEFT chooses its layers


def round_weights(model: Any, head: nn.Module, dtype: torch.dtype, bits: Bits) -> None:
    """Round the weights that :func:`quantise` would quantize, converted to ``dtype`` first; they stay plain tensors."""
    for name in _layers(model, head, bits):
        layer = model.get_submodule(name)
        layer.weight.data.copy_(plain_weight(_quantised(layer, dtype, bits)))


def _quantised(layer: nn.Linear, dtype: torch.dtype, bits: Bits) -> Any:
    """A layer that computes in ``dtype`` with the quantized weights of ``layer``."""
    bitsandbytes = library(field_of(bits)).nn
    weight = layer.weight.data.to(dtype)
    if bits == 8:
        from alignment_core.models.int8_linear import Int8Linear

        return Int8Linear(weight, layer.bias)
    options = {"compute_dtype": dtype, "quant_type": "nf4", "device": "meta"}
    small = bitsandbytes.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, **options)
    # Some processors would compute in bfloat16 without gradients and in another type with them.
    small.support_avx512bf16_for_cpu = False
    small.weight = bitsandbytes.Params4bit(weight, quant_type="nf4", module=small).to("cpu")
    small.bias = layer.bias
    return small


def _layers(model: nn.Module, head: nn.Module, bits: Bits) -> list[str]:
    from torch import nn

    from alignment_core.models.image_text import of_language_model

    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    layers = of_language_model(model, layers)
    if not layers:
        raise UserError(
            f"{field_of(bits)}: this model has no linear layer apart from its head; train all of its weights"
        )
    return layers


def check_installed(field: str) -> None:
    """Raise UserError if ``bitsandbytes``, which ``field`` needs, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{field}: the package bitsandbytes is not installed; install the extra: pip install 'alignment[qlora]'"
        )


def library(field: str) -> Any:
    """The package ``bitsandbytes``, which ``field`` needs. Raises UserError if it does not load."""
    check_installed(field)
    import bitsandbytes

    if isinstance(bitsandbytes.cextension.lib, bitsandbytes.cextension.ErrorHandlerMockBNBNativeLibrary):
        raise UserError(
            f"{field}: bitsandbytes has no library for this machine, see `python -m bitsandbytes`; leave the field out"
        )
    return bitsandbytes


def is_quantised(module: nn.Module) -> bool:
    """Whether a module is a quantized layer."""
    weight = getattr(module, "weight", None)
    return hasattr(weight, "quant_state") or hasattr(weight, "SCB")


def plain_weight(module: Any) -> Tensor:
    """The dequantized weights of a quantized layer, in their original type, on the layer's device."""
    if hasattr(module.weight, "quant_state"):
        import bitsandbytes

        plain: Tensor = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        return plain
    from alignment_core.models.int8_linear import dequantised

    return dequantised(module.weight.data, module.weight.SCB, module.compute_dtype)


def size(parameter: Any) -> int:
    """Number of elements of a parameter, also of a quantized one."""
    state = getattr(parameter, "quant_state", None)  # 4 bits: two weights in a byte
    return prod(state.shape) if state else int(parameter.numel())


def item_bytes(model: nn.Module, name: str) -> int:
    """Bytes of one element of the parameter or buffer ``name``, after dequantization."""
    owner, _, kind = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    dtype = module.compute_dtype if kind == "weight" and is_quantised(module) else getattr(module, kind).dtype
    return int(dtype.itemsize)
