"""DeepSpeed engines, with workarounds for DeepSpeed: of a model with its optimiser at every ZeRO stage, and of frozen ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from alignment_core.credentials import cut, resolved
from alignment_core.errors import UserError, one_line
from alignment_core.models.quantization import size as numbers_of
from alignment_core.models.sharded import restore_linear, shard
from alignment_core.models.tensor_parallel import TensorGroup
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ema import whole_tensors

LARGEST_BUCKET = 500_000_000
"""Gradients that are reduced at a time: DeepSpeed's default."""
BUCKETS = 8
"""In which the gradients of a smaller model are reduced."""


class RecordingDict(dict[str, Any]):
    """A configuration that records which of its entries are read, so that unknown options can be refused."""

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
    """Nested settings, overridden by ``more``."""
    both = {
        name: _merged(settings[name], value) for name, value in more.items() if isinstance(settings.get(name), dict)
    }
    return {**settings, **more, **both}


def make_engine(
    module: torch.nn.Module,
    optimizer: Any,
    resources: ResourcesConfig,
    zero_stage: int,
    bf16: bool,
    max_grad_norm: float,
    device: str,
    tensor_group: TensorGroup | None = None,
) -> Any:
    """DeepSpeed's engine for ``module`` on a ``device``; gradients accumulate until its ``step``, and ``max_grad_norm`` of 0
    clips nothing. The ranks of the ``tensor_group`` have a part of the model each.

    With ``bf16`` gradients accumulate in fp32: the sum of some hundred micro-batches in bf16 is off by some percent. Raises
    UserError for options in ``resources.deepspeed`` that DeepSpeed does not accept.
    """
    # DeepSpeed has room for a second copy of as many gradients, and its default is more than all of a small model.
    bucket = min(LARGEST_BUCKET, max(1, sum(numbers_of(p) for p in module.parameters() if p.requires_grad) // BUCKETS))
    settings = _settings(zero_stage, bf16)
    settings |= {
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW steps on the CPU, see make_optimizer
    }
    settings["zero_optimization"] |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if bf16 and zero_stage:  # without ZeRO DeepSpeed refuses this option, and `grad_dtype` of torch does the same
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    settings["zero_optimization"] |= _transfers(resources, device)
    tensor_group = tensor_group or TensorGroup()
    engine = _initialized(module, optimizer, settings, resources, device, tensor_group)
    if zero_stage == 0 and tensor_group.get_data_parallel_world_size() == 1:
        engine.enable_backward_allreduce = False  # it would copy all gradients, to sum them over a single rank
    if bf16 and zero_stage == 0:
        _undo_first_step(engine)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
    return engine


def _transfers(resources: ResourcesConfig, device: str) -> dict[str, Any]:
    """DeepSpeed's settings of ZeRO about offloading, and about sums of gradients beside the backward pass, for which a CPU has
    no second stream."""
    settings: dict[str, Any] = {"overlap_comm": resources.overlap_comm and device != "cpu"}
    if resources.offload_optimizer:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": resources.pin_memory}
    return settings


def make_frozen_engine(module: torch.nn.Module, resources: ResourcesConfig, bf16: bool, device: str) -> Any:
    """DeepSpeed's engine for a ``module`` that is not trained and is in parts on all ranks; calls of the module itself are
    collective then. Raises UserError as :func:`make_engine` does."""
    return _initialized(module, None, _settings(3, bf16), resources, device)


def _settings(zero_stage: int, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's settings of any model."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires a number; packs have any number of rows
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the number of packs per step varies, so `step` is the boundary
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": zero_stage, "overlap_comm": False},
    }


def _initialized(
    module: torch.nn.Module,
    optimizer: Any,
    settings: dict[str, Any],
    resources: ResourcesConfig,
    device: str,
    tensor_group: TensorGroup | None = None,
) -> Any:
    """DeepSpeed's engine for these settings and those of the recipe."""
    import deepspeed

    ranks = tensor_group if tensor_group is not None and tensor_group.size > 1 else None
    deepspeed.utils.groups.mpu = ranks  # DeepSpeed keeps it for the process, also for engines that are made without one

    config = RecordingDict(_merged(settings, resolved(resources.deepspeed, "resources.deepspeed")))
    try:
        if settings["zero_optimization"]["stage"] == 3:
            shard(module, torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32, device, config)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=ranks)
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        if not resources.deepspeed:
            raise
        raise UserError(f"resources.deepspeed: DeepSpeed refuses it: {cut(one_line(error))}") from None
    if unknown := [name for name in resources.deepspeed if name not in config.names]:
        raise UserError(f"resources.deepspeed.{unknown[0]}: DeepSpeed has no such option")
    return engine


def _undo_first_step(engine: Any) -> None:
    """Undo the step that DeepSpeed's bf16 optimiser of stage 0 takes with gradients of zero when it is made.

    AdamW would otherwise correct the bias of the first real step as if it were the second, and weights would have decayed once.
    """
    engine.basic_optimizer.state.clear()
    master = whole_tensors(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if id(parameter) in master:
                master[id(parameter)].copy_(parameter)


def fill_gradients(module: torch.nn.Module) -> None:
    """Give parameters that no micro-batch used, such as those of an idle expert, a gradient of zero; for ZeRO stage 0.

    An optimiser leaves out parameters without a gradient: their moments and weights would not decay, as they do at the other
    stages, and their numbers of steps would differ. DeepSpeed makes these gradients only before it sums those of several
    ranks, and in the parameter's own type where others are in fp32.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def close_engine(engine: Any, module: torch.nn.Module, zero_stage: int) -> None:
    """Free the memory of an engine and its module.

    ZeRO 3 keeps references to all modules, in a global list and in caches of methods: models of earlier jobs would fill the
    memory. It also replaces the linear layers of all models of the process.
    """
    engine.destroy()
    if zero_stage != 3:
        return
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    restore_linear()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]
    # DeepSpeed wraps its methods, so the caches are in closures.
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
