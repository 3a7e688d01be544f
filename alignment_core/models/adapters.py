"""LoRA: small trained matrices beside a model's frozen linear layers (Hu et al. 2021), and the plain model they amount to.

A layer's output is W x + (lora_alpha / r) B A x, with A [r, in] random at first and B [out, r] zero: equation 3 of the paper.
With rsLoRA (Kalajdzievski 2023) the factor is lora_alpha / √r. With DoRA (Liu et al. 2024) each row of
W + (lora_alpha / r) B A is brought to a trained length m [out], at first that of W's row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.errors import UserError
from alignment_core.recipes import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER = "default"
"""PEFT's name for the one adapter that there is."""
BASE = ".base_layer."
"""What PEFT puts into the name of a parameter of an adapted layer: ``layer.base_layer.weight``."""


def add_adapters(model: Any, head: nn.Module, config: LoraConfig, seed: int, train_head: bool) -> None:
    """Freeze ``model`` and put adapters, random from ``seed``, beside its linear layers other than ``head``.

    With ``train_head`` the head is not frozen. Raises UserError where a name fits no linear layer.
    """
    import peft
    import torch

    options = {**config.model_dump(), "target_modules": _targets(model, head, config)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(peft.LoraConfig(**options), model, ADAPTER)
    if train_head:
        head.requires_grad_(True)


def _targets(model: nn.Module, head: nn.Module, config: LoraConfig) -> list[str]:
    """Full names of the layers that get an adapter."""
    from torch import nn

    linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    wanted = kinds if config.target_modules == "all-linear" else config.target_modules
    found = {one: [name for name in linear if f".{name}".endswith(f".{one}")] for one in wanted}
    if unknown := [one for one, names in found.items() if not names]:
        raise UserError(
            f"training.lora.target_modules: apart from its head, this model has no linear layer {unknown[0]!r}; it has "
            f"{', '.join(kinds)}"
        )
    if not linear:
        raise UserError("training.lora: this model has no linear layer apart from its head; train all of its weights")
    return sorted({name for names in found.values() for name in names})


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it a forward pass is that of the frozen model."""
    from peft.tuners.lora import LoraLayer

    layers = [one for one in model.modules() if isinstance(one, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True  # what PEFT has for it changes `requires_grad`, on which DeepSpeed relies
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_names(model: nn.Module) -> list[str]:
    """Names of the parameters, those of adapters left out."""
    return [name for name, _ in model.named_parameters() if not _is_adapter(name)]


def adapters_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of the adapters beside the layers whose parameters are named; none without LoRA."""
    known = {name for name, _ in model.named_parameters() if _is_adapter(name)}
    beside = [one for name in names if name.endswith(f"{BASE}weight") for one in _names(name.rpartition(BASE)[0])]
    return [name for name in beside if name in known]


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` of the model as those of one without adapters: W + (lora_alpha / r) B A, with DoRA m times the directions of
    its rows, worked out in fp32.

    The adapters of each layer in ``weights`` must be there, too. What is merged lies on the CPU, so that a device holds one
    such weight at a time; all else comes as it is.
    """
    found = {}
    for name, tensor in weights.items():
        layer, base, kind = name.rpartition(BASE)
        if base and kind == "weight":
            a, b, *lengths = (weights[one].detach().float() for one in _names(layer) if one in weights)
            scaling: Any = model.get_submodule(layer).scaling
            whole = tensor.detach().float().addmm(b, a, alpha=scaling[ADAPTER])
            for length in lengths:
                whole *= (length / whole.norm(dim=1))[:, None]
            tensor = whole.to(tensor.dtype).cpu()
        if not _is_adapter(name):
            found[f"{layer}.{kind}" if base else name] = tensor
    return found


def save_adapter(
    weights: Mapping[str, Tensor], config: LoraConfig, head: str | None, base: str, directory: Path
) -> None:
    """Write the adapters among ``weights`` as ``peft`` does, and the trained ``head``, if there is one.

    ``PeftModel.from_pretrained`` puts them into the model that they were trained beside, which their configuration calls
    ``base``.
    """
    import peft
    from safetensors.torch import save_file

    tensors = {_in_file(name): tensor for name, tensor in weights.items() if _is_adapter(name)}
    layers = sorted(name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight"))
    heads = {f"{head}.weight": weights[f"{head}.weight"]} if head else {}
    found = {
        f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in (tensors | heads).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(found, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    peft.LoraConfig(
        **{**config.model_dump(), "target_modules": layers},
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
        inference_mode=True,
    ).save_pretrained(directory)
    written = directory / "adapter_config.json"
    content = json.loads(written.read_text()) | {"target_modules": layers}  # a set: in another order each time
    written.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""What PEFT calls the parameters of an adapter; the last are DoRA's lengths."""


def _in_file(name: str) -> str:
    """What PEFT calls a parameter of an adapter in its files."""
    return name.replace(f".{ADAPTER}.", ".").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _names(layer: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{part}.{ADAPTER}.weight" for part in PARTS)


def _is_adapter(name: str) -> bool:
    return name.endswith(tuple(f".{part}.{ADAPTER}.weight" for part in PARTS))
