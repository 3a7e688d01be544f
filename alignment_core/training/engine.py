"""A DeepSpeed engine that trains a model with one optimiser, whatever the ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from alignment_core.credentials import cut, resolved
from alignment_core.errors import UserError, one_line
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ema import whole_tensors


class RecordingDict(dict[str, Any]):
    """A configuration that knows which of its entries were asked for."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with further ones."""
    both = {name: _merged(settings[name], one) for name, one in more.items() if isinstance(settings.get(name), dict)}
    return {**settings, **more, **both}


def make_engine(
    module: torch.nn.Module,
    optimizer: Any,
    resources: ResourcesConfig,
    zero_stage: int,
    bf16: bool,
    max_grad_norm: float,
) -> Any:
    """DeepSpeed's engine for ``module``, whose backward passes add up until its ``step``; ``max_grad_norm`` of 0 clips nothing.

    With ``bf16`` gradients are added up in fp32: the sum of some hundred micro-batches in bf16 is off by some percent. Raises
    UserError for options in ``resources.deepspeed`` that DeepSpeed does not take.
    """
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `step` is the boundary: packs per step vary
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False},
    }
    if bf16 and zero_stage:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if resources.offload_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    asked = RecordingDict(_merged(settings, resolved(resources.deepspeed, "resources.deepspeed")))
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=asked)
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        if not resources.deepspeed:
            raise
        raise UserError(f"resources.deepspeed: DeepSpeed does not take it: {cut(one_line(error))}") from None
    if unknown := [name for name in resources.deepspeed if name not in asked.names]:
        raise UserError(f"resources.deepspeed.{unknown[0]}: DeepSpeed has no such option")
    if bf16 and zero_stage == 0:
        _begin_anew(engine)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
    return engine


def _begin_anew(engine: Any) -> None:
    """Undo the step with gradients of zero that DeepSpeed's optimiser for stage 0 begins with: AdamW would take the first real
    step for its second, and weights have decayed once."""
    engine.basic_optimizer.state.clear()
    master = whole_tensors(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if id(parameter) in master:
                master[id(parameter)].copy_(parameter)


def fill_gradients(module: torch.nn.Module) -> None:
    """Give parameters that no micro-batch used, such as those of an expert, a gradient of zero, where gradients are in fp32 and
    the parameters are not: DeepSpeed would give them one of their own type."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.grad_dtype != parameter.dtype:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
