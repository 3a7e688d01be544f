"""The memory that a plan needs, before a run starts: a lower bound from the model's shape, compared with this machine's."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.composition.plan import PlannedStage
from alignment_core.errors import EnvironmentFault
from alignment_core.inference.kv_cache import mib_of_engine, number_bytes_of
from alignment_core.machine_memory import GIB, gib, machine_memory
from alignment_core.recipes import ResourcesConfig, TrainingConfig

HOST_BYTES, TRAINER_BYTES, ENGINE_BYTES = int(0.4 * GIB), int(0.3 * GIB), int(0.5 * GIB)
"""Least memory of processes before they load a model."""
GRADIENT_AND_MOMENTS = {"adamw": 12, "adamw_8bit": 6, "paged_adamw_8bit": 6}
"""Bytes for a parameter, once for all trainers: its gradient in fp32 and Adam's two moments in fp32 or 8 bits."""
DELTA_BYTES = 2
"""Bytes for a parameter of a copy of the last update; the first trainer and each worker of an engine keep one for deltas."""
SAMPLING_DTYPE = "bfloat16"
"""Float type of an engine whose policy is not trained meanwhile: the smaller one of those that it may be stored in."""


def parameters(shape: dict[str, Any]) -> int:
    """Parameters of a Llama-like language model from its ``config.json``, without biases and norms; 0 if unknown. A new model
    has no ``vocab_size`` before its tokenizer exists, so its embeddings are not counted.

    V·H for the embedding, once more if the head is not tied; in each layer H·d·(2·n + 2·k) for n query and k key-value heads
    of size d, and 3·H·I for each expert, or for the MLP of a dense model.
    """
    shape = {**shape, **(shape.get("text_config") or {})}
    experts = shape.get("num_local_experts") or shape.get("num_experts") or 1
    inner = (shape.get("moe_intermediate_size") if experts > 1 else None) or shape.get("intermediate_size")
    hidden, layers, heads = (shape.get(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if not (hidden and layers and heads and inner):
        return 0
    size, shared = shape.get("head_dim") or hidden // heads, shape.get("num_key_value_heads") or heads
    embeddings = (shape.get("vocab_size") or 0) * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return int(embeddings + layers * (hidden * size * 2 * (heads + shared) + 3 * hidden * inner * experts))


def bytes_needed(
    todo: list[PlannedStage], count: int, resources: ResourcesConfig, shape: dict[str, Any] | None = None
) -> int:
    """Least bytes that the most demanding of these stages needs for a model of ``count`` parameters and, if it is known, this
    ``shape``; 0 if none uses trainers or engines, or if they run on GPUs or on a cluster."""
    if not ray_cluster.is_private() or resources.device == "cuda":
        return 0
    if resources.device == "auto" and not metadata.version("torch").endswith("+cpu"):
        return 0
    device = Device.detect("cpu")
    return max((_of_stage(stage.config, count, device, resources, shape or {}) for stage in todo), default=0)


def training_of(config: Any) -> TrainingConfig | None:
    """The training of a stage; None if it trains nothing."""
    training = getattr(getattr(config, "section", config), "training", None)
    return training if isinstance(training, TrainingConfig) else None


def _of_stage(config: Any, count: int, device: Device, resources: ResourcesConfig, shape: dict[str, Any]) -> int:
    training, sampling = training_of(config), config.sampling()
    trainers, engines = device.trainers(resources), device.engines(resources)
    needed = 0
    if training is not None:
        weights = training.base_bits / 8 if training.base_bits else 2 if training.bf16 else 4
        state = 0 if training.lora else GRADIENT_AND_MOMENTS.get(training.optimizer, 0) * count
        whole = trainers // resources.trainer_tensor_parallel_size  # models that the ranks hold together
        needed += trainers * TRAINER_BYTES + whole * int(weights * count) + state
    if sampling is not None:
        dtype = sampling.dtype or SAMPLING_DTYPE
        cache = _cache(shape, sampling.generation.max_completion_length, dtype, resources, engines)
        needed += engines * (ENGINE_BYTES + number_bytes_of(dtype) * count + cache)
    if training is not None and sampling is not None and resources.weight_update_mode == "delta":
        needed += DELTA_BYTES * count * (1 + engines * resources.tensor_parallel_size)
    return needed + HOST_BYTES if needed else 0


def _cache(shape: dict[str, Any], tokens: int, dtype: str, resources: ResourcesConfig, engines: int) -> int:
    """Least bytes of each engine's key-value cache for completions of so many tokens."""
    if not shape and resources.kv_cache_mib is None:
        return 0
    return mib_of_engine(shape, tokens, dtype, resources, engines) << 20


def shortage(needed: int) -> str | None:
    """A sentence if other processes use some of the needed memory. Raises EnvironmentFault if this machine has too little."""
    memory = machine_memory()
    if needed > memory.usable:
        raise EnvironmentFault(
            f"this run needs at least {gib(needed)} of memory, and {gib(memory.usable)} of this machine's {gib(memory.total)} "
            "may be used (Ray's memory monitor keeps the rest free): use a smaller model, `lora`, fewer "
            "`resources.trainers` and `resources.engines`, a smaller `resources.kv_cache_mib`, or a machine with more memory"
        )
    if needed > memory.free:
        return (
            f"this run needs at least {gib(needed)} of memory, and {gib(memory.free)} are free: other processes use "
            f"{gib(memory.used)} of {gib(memory.total)}; stages wait for memory if their actors are killed for the lack of it"
        )
    return None
