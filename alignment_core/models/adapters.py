"""LoRA: small trained matrices beside a model's frozen weights (Hu et al. 2021), and merging them into the model.

A layer's output is W x + (lora_alpha / r) B A x, with A [r, in] random at first and B [out, r] zero: equation 3 of the paper.
With rsLoRA (Kalajdzievski 2023) the factor is lora_alpha / √r. With DoRA (Liu et al. 2024) each row of
W + (lora_alpha / r) B A is scaled to a trained length m [out], initially that of W's row.

The experts of a mixture that are one parameter [E, out, in] have the matrices of all experts in one A [E·r, in] and one B
[out, r·E], as PEFT keeps them: row e·r + i of A and column i·E + e of B belong to expert e.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.errors import UserError, first_line
from alignment_core.models.quantization import Bits, is_quantised, plain_weight
from alignment_core.recipes import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)
ADAPTER = "default"
"""PEFT's name for the only adapter."""
QUANTISATION = "quantization_config.json"
"""File in the folder of an adapter that was trained beside quantized weights: their quantization, in ``transformers``' form."""
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
QUANTISATIONS: dict[Bits, dict[str, Any]] = {
    4: {"quant_method": "bitsandbytes", **NF4},
    8: {"quant_method": "bitsandbytes", "load_in_8bit": True},
}
"""The content of that file, by bits of a weight."""
BASE = "base_layer."
"""PEFT's infix in the names of an adapted module's own parameters: ``layer.base_layer.weight``; as often as the module has
adapters, of which each belongs to another parameter."""
PARAMETER = "parameter_name"
"""Attribute of PEFT's wrappers for a module's parameter, by which they differ from its linear layers with adapters."""


def add_adapters(model: Any, head: nn.Module, config: LoraConfig, seed: int, train_head: bool) -> None:
    """Freeze ``model`` and add adapters, initialised from ``seed``, to its linear layers other than ``head`` and to the
    parameters of ``config.target_parameters``.

    The modules of ``config.modules_to_save`` and, with ``train_head``, the head are not frozen. Raises UserError for a name
    that matches no module or parameter, and for layers that PEFT does not adapt.
    """
    import peft
    import torch

    whole = _trained_whole(model, config)
    layers = _targets(model, head, config, whole)
    if config.target_modules == "all-linear":
        layers = _without_experts(model, layers)
    parameters = _target_parameters(model, head, config, whole)
    options = {**_options(config), "target_modules": layers, "target_parameters": parameters}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(peft.LoraConfig(**options), model, ADAPTER)
        except ValueError as error:
            raise UserError(
                f"training.lora: `peft` cannot add these adapters to a {model.config.model_type} model ({first_line(error)})"
            ) from None
    _check_adapted(model, layers)
    for name in whole:
        if any(is_quantised(module) for module in model.get_submodule(name).modules()):
            raise UserError(
                f"training.lora.modules_to_save: {name} is in {config.base_bits} bits and cannot be trained whole; embeddings "
                "and the head can"
            )
        model.get_submodule(name).requires_grad_(True)
    if train_head:
        head.requires_grad_(True)


def fitting(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """The ``config`` for another model without the names that this one lacks; if it names nothing else to adapt, for all linear
    layers."""
    from torch import nn

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layers = config.target_modules
    if layers != "all-linear":
        layers = _known(layers, linear)
    parameters = _known(config.target_parameters, [name for name, _ in model.named_parameters()])
    whole = _known(config.modules_to_save, [name for name, _ in model.named_modules()])
    return config.model_copy(
        update={
            "target_modules": layers if layers or parameters else "all-linear",
            "target_parameters": parameters,
            "modules_to_save": whole,
        }
    )


def _without_experts(model: nn.Module, layers: list[str]) -> list[str]:
    """The ``layers`` without those that PEFT takes for experts, see :func:`_check_adapted`."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = peft.LoraConfig(target_modules=layers)
    convert_peft_config_for_transformers(converted, model, None)
    left = [layer for layer in layers if layer in converted.target_modules]
    if len(left) < len(layers):
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in {*layers} - {*left}}))
        log.warning(
            "training.lora.target_modules: all-linear leaves out %s, whose names `peft` has for the experts; those are adapted "
            "by `target_parameters`",
            kinds,
        )
    return left


def _check_adapted(model: Any, layers: Sequence[str]) -> None:
    """Raise UserError unless each of the ``layers`` has an adapter. In some mixtures of experts PEFT takes all layers with the
    names that experts had in earlier versions of ``transformers`` for experts, also those of dense blocks and shared experts.
    """
    adapted = {plain_name(name) for name in _adapters(model)}
    missed = [layer for layer in layers if f"{layer}.weight" not in adapted]
    if missed:
        kinds, wrong = ({name.rpartition(".")[2] for name in names} for names in (layers, missed))
        rest = f", such as [{', '.join(sorted(kinds - wrong))}]" if kinds - wrong else ""
        raise UserError(
            f"training.lora.target_modules: `peft` adapts experts of a {model.config.model_type} model in the place of "
            f"{missed[0]}, which has their name: name layers other than {', '.join(sorted(wrong))}{rest}"
        )


def _options(config: LoraConfig) -> dict[str, Any]:
    """PEFT's options for the layers that get an adapter."""
    resolved = {"target_modules", "target_parameters", "modules_to_save"}
    return config.model_dump(exclude={*resolved, "load_in_4bit", "load_in_8bit"})


def _trained_whole(model: nn.Module, config: LoraConfig) -> list[str]:
    """Full names of the modules that ``config`` names to be trained whole, and of those tied to them."""
    modules = dict(model.named_modules())
    matches = _by_suffix(config.modules_to_save, modules)
    if unknown := [suffix for suffix, names in matches.items() if not names]:
        with_weights = (name for name, module in modules.items() if next(module.parameters(False), None) is not None)
        kinds = sorted({name.rpartition(".")[2] for name in with_weights})
        raise UserError(
            f"training.lora.modules_to_save: this model has no module {unknown[0]!r}; it has {', '.join(kinds)}"
        )
    named = {name for names in matches.values() for name in names}
    trained = {id(weight) for name in named for weight in modules[name].parameters()}
    tied = {
        name for name, module in modules.items() if any(id(weight) in trained for weight in module.parameters(False))
    }
    return sorted(named | {name for name in tied if not any(name.startswith(f"{parent}.") for parent in named)})


def _by_suffix(suffixes: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """For each suffix the dotted names that end with it, as ``q_proj`` of ``layers.0.self_attn.q_proj``."""
    names = list(names)
    return {suffix: [name for name in names if f".{name}".endswith(f".{suffix}")] for suffix in suffixes}


def _known(suffixes: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(suffix for suffix, matches in _by_suffix(suffixes, names).items() if matches)


def _targets(model: nn.Module, head: nn.Module, config: LoraConfig, whole: Sequence[str]) -> list[str]:
    """Full names of the layers that get an adapter: neither those of modules that are trained ``whole``, nor those that read
    images."""
    from torch import nn

    from alignment_core.models.image_text import of_language_model

    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not _is_below(name, whole)
    ]
    linear = of_language_model(model, linear)
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    wanted = kinds if config.target_modules == "all-linear" else config.target_modules
    matches = _by_suffix(wanted, linear)
    if unknown := [suffix for suffix, names in matches.items() if not names]:
        raise UserError(
            f"training.lora.target_modules: apart from its head, this model has no linear layer {unknown[0]!r}; it has "
            f"{', '.join(kinds)}"
        )
    if not linear and not config.target_parameters:
        raise UserError("training.lora: this model has no linear layer apart from its head; train all of its weights")
    return sorted({name for names in matches.values() for name in names})


def _target_parameters(model: nn.Module, head: nn.Module, config: LoraConfig, whole: Sequence[str]) -> list[str]:
    """Full names of the parameters of ``config.target_parameters``: matrices, or one per expert, outside of linear layers and
    embeddings. Modules that are trained ``whole`` have none."""
    from torch import nn

    layers = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    known = {
        f"{name}.{parameter}": isinstance(module, layers) or module is head
        for name, module in model.named_modules()
        for parameter, weights in module.named_parameters(recurse=False)
        if weights.dim() in (2, 3) and name and not _is_below(name, whole)
    }
    adaptable = [name for name, is_layer in known.items() if not is_layer]
    matches = _by_suffix(config.target_parameters, adaptable)
    for suffix, names in matches.items():
        if names:
            continue
        kinds = sorted({_kind(name) for name in adaptable})
        shown = difflib.get_close_matches(suffix, kinds, n=5, cutoff=0.4) or kinds
        if _by_suffix([suffix], known)[suffix]:
            why, cure = f"{suffix!r} is the weight of a layer", "`target_modules` adapts linear layers"
        else:
            why, cure = f"this model has no parameter {suffix!r}", "name linear layers in `target_modules`"
        others = f"outside of layers it has {', '.join(shown)}" if shown else "it has none outside of layers"
        raise UserError(f"training.lora.target_parameters: {why}; {others} ({cure})")
    return sorted({name for names in matches.values() for name in names})


def _kind(name: str) -> str:
    """The name of a parameter within its block: ``mlp.experts.down_proj`` of ``model.layers.0.mlp.experts.down_proj``."""
    return re.split(r"\.\d+\.", name)[-1]


def _is_below(name: str, parents: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """In this context a forward pass is that of the model without adapters."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's own method changes `requires_grad`, on which DeepSpeed relies
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_names(model: nn.Module) -> list[str]:
    """Names of the parameters, without those of adapters, and of the buffers that a checkpoint has."""
    buffers = (
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    )
    return [*(name for name, _ in model.named_parameters() if not is_adapter(name)), *buffers]


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name."""
    owner, _, tensor = name.rpartition(".")
    return getattr(model.get_submodule(owner), tensor)


def adapters_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of the adapter parameters that belong to the named parameters; none without LoRA."""
    layers = (_layer_of(model, name) for name in names)
    return [part for layer in layers if layer for part in _names(layer) if _has_tensor(model, part)]


def _adapters(model: nn.Module) -> dict[str, str]:
    """For each parameter that has an adapter the module that holds the adapter, by name."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: layer for name in names if (layer := _layer_of(model, name))}


def _layer_of(model: nn.Module, name: str) -> str | None:
    """The module that holds the adapter of a parameter, by name; None if it has none.

    PEFT wraps a module once for each of its parameters that has an adapter.
    """
    module, _, parameter = name.rpartition(".")
    while f"{module}.".endswith(f".{BASE}"):
        from peft.tuners.lora import LoraLayer

        module = module.rpartition(".")[0]
        layer = model.get_submodule(module)
        if isinstance(layer, LoraLayer) and getattr(layer, PARAMETER, "weight") == parameter:
            return module
    return None


def _has_tensor(model: nn.Module, name: str) -> bool:
    """Whether the model has a parameter or a buffer of this name. It does not walk through all modules, as it is asked for each
    weight of a model."""
    owner, _, tensor = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    return module._parameters.get(tensor) is not None or module._buffers.get(tensor) is not None


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` of the model with adapters merged in: W + (lora_alpha / r) B A, with DoRA m times the directions of its rows,
    computed in fp32. A quantized weight is dequantized first, so that the result is the trained model.

    A weight whose adapters are missing in ``weights`` stays W. Merged weights are on the CPU, so that a device holds one of
    them at a time; all others are returned as they are.
    """
    plain = {}
    for name, tensor in weights.items():
        if not _has_tensor(model, name):
            continue  # scales of quantized weights
        owner = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and is_quantised(owner):
            tensor = plain_weight(owner)
        layer = _layer_of(model, name)
        if layer and _names(layer)[0] in weights:
            parts = [weights[part].detach().float() for part in _names(layer) if part in weights]
            tensor = _sum(model.get_submodule(layer), tensor.detach().float(), *parts).to(tensor.dtype).cpu()
        if not is_adapter(name):
            plain[plain_name(name)] = tensor
    return plain


def _sum(layer: Any, weights: Tensor, a: Tensor, b: Tensor, length: Tensor | None = None) -> Tensor:
    """W + (lora_alpha / r) B A. ``weights`` [out, in] or, of experts in one parameter, [E, out, in] or [E, in, out]; ``length``
    [out] is DoRA's."""
    scaling = layer.scaling[ADAPTER]
    if weights.dim() == 3:
        experts = len(weights)
        a = a.view(experts, -1, a.shape[1])  # [E, r, in]
        b = b.view(len(b), -1, experts).permute(2, 0, 1)  # [E, out, r]
        if getattr(layer.get_base_layer(), "is_transposed", False):
            a, b = b.mT, a.mT
        return weights.baddbmm(b, a, alpha=scaling)
    whole = weights.addmm(b, a, alpha=scaling)
    return whole if length is None else whole * (length / whole.norm(dim=1))[:, None]


def save_adapter(
    model: nn.Module, weights: Mapping[str, Tensor], config: LoraConfig, head: str | None, base: str, directory: Path
) -> None:
    """Write the adapters among ``weights`` of the ``model`` in PEFT's format, with the modules that were trained whole and the
    ``head``, if one is named.

    ``PeftModel.from_pretrained`` adds them to the model that they were trained with, which their configuration names ``base``.
    """
    import peft
    from safetensors.torch import save_file

    tensors = {_in_file(name): tensor for name, tensor in weights.items() if is_adapter(name)}
    adapters = _adapters(model)
    wraps = {name: hasattr(model.get_submodule(layer), PARAMETER) for name, layer in adapters.items()}
    targets: dict[str, Any] = {
        "target_modules": sorted(layer for name, layer in adapters.items() if not wraps[name]),
        "target_parameters": sorted(plain_name(name) for name in adapters if wraps[name]) or None,
    }
    whole = sorted({*_trained_whole(model, config), *([head] if head else [])})
    tensors |= {name: weights[name] for name in weights if any(name.startswith(f"{parent}.") for parent in whole)}
    file = {f"base_model.model.{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(file, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    peft.LoraConfig(
        **{**_options(config), **targets},
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=whole or None,
        inference_mode=True,
    ).save_pretrained(directory)
    if config.base_bits:
        (directory / QUANTISATION).write_text(json.dumps(QUANTISATIONS[config.base_bits], indent=2) + "\n")
    written = directory / "adapter_config.json"
    # PEFT writes a set, in another order each time
    content = json.loads(written.read_text()) | targets
    written.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""PEFT's names for the parameters of an adapter; the last are DoRA's lengths."""


def plain_name(name: str) -> str:
    """The name of a parameter in the model without adapters."""
    return name.replace(BASE, "")


def _in_file(name: str) -> str:
    """PEFT's name for a parameter of an adapter in its files."""
    return name.replace(f".{ADAPTER}.", ".").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _names(layer: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{part}.{ADAPTER}.weight" for part in PARTS)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return name.endswith(tuple(f".{part}.{ADAPTER}.weight" for part in PARTS))
