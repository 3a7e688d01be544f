"""Size of vLLM's key-value cache, from a model's ``config.json`` and this machine's memory: nothing heavy is imported."""

from __future__ import annotations

import re
from typing import Any

from alignment_core.machine_memory import machine_memory
from alignment_core.memory import out_of_memory
from alignment_core.models.saving import dtype_of
from alignment_core.recipes.sections.resources import ResourcesConfig

MIB = 1 << 20
BLOCK = 32
"""Tokens in a block of the cache on a CPU."""
SIZES = {"float64": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of a number, by the name of its type."""
SMALLEST = 2
"""Bytes of a number of a type that is not in ``SIZES``."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Types in ``layer_types`` whose cache grows with the sequence; the state of the others has a fixed size."""
HYBRID = re.compile(
    r"mamba|ssm|attn_layer|attn_idx|block_type|hybrid|recurrent|lru_width|rwkv|linear_attn|conv_L_cache"
)
"""Names of fields of models with recurrent layers; only ``layer_types`` says which layers these are."""
UNEVEN = ("global_head_dim", "num_global_key_value_heads", "cla_share_factor", "use_cla", "block_configs")
"""Fields of models whose layers have caches of different sizes, or share them."""
MAX_NUM_SEQS, MAX_NUM_SEQS_ON_LARGE_GPUS = 256, 1024
"""Defaults of ``resources.max_num_seqs``, on GPUs those of vLLM 0.32 (``EngineArgs.get_batch_defaults``)."""
LARGE_GPU = 70 << 30
"""Bytes of memory of a large GPU. The A100 is none, as in vLLM."""
MOST_BY_DEFAULT = 1024
"""MiB of an engine's cache that the recipe does not ask for."""
LEAST_ROOM, PART_OF_MEMORY = 256, 8
"""MiB of an engine's cache, and part of the memory for those of all engines, that more than one sequence may take."""
TOO_LARGE = re.compile(r"is less than requested memory for kv")
"""vLLM's message (``determine_available_memory`` of its worker for CPUs)."""
TOO_SMALL = re.compile(r"KV cache is needed, which is larger than the available")
"""vLLM's message (``_check_enough_kv_cache_memory``)."""
NO_CACHE = "No available memory for the cache blocks"
"""vLLM's message (``_check_enough_kv_cache_memory``)."""
NOT_FREE = re.compile(r"Free memory on device .* on startup is less than")
"""vLLM's message (``request_memory``)."""


def bytes_per_token(shape: dict[str, Any], number_bytes: int | None = None, shards: int = 1) -> int | None:
    """Bytes of the cache for one token on each of ``shards`` tensor-parallel workers; None for an unknown layout.

    Plain attention: 2 (key and value) · layers · key-value heads · head dimension · bytes of a number. Multi-head latent
    attention: layers · (latent rank + rotary dimension) · bytes. Exact for these two. Layers with a sliding window count in
    full, as on a CPU, where vLLM reads a prompt in one piece and keeps all of it. Recurrent layers count as nothing.
    """
    model = {**shape, **(shape.get("text_config") or {})}
    size = number_bytes or number_bytes_of(dtype_of(shape))
    layers = _attention_layers(model)
    heads = model.get("num_attention_heads") or model.get("n_head")
    width = model.get("hidden_size") or model.get("n_embd")
    if not layers or not isinstance(heads, int) or not isinstance(width, int):
        return None
    if isinstance(rank := model.get("kv_lora_rank"), int):
        return layers * (rank + int(model.get("qk_rope_head_dim") or 0)) * size
    key_value_heads = model.get("num_key_value_heads") or (1 if model.get("multi_query") else heads)
    head_dim = model.get("head_dim") or width // heads
    if not isinstance(key_value_heads, int) or not isinstance(head_dim, int):
        return None  # a list: they differ between layers
    return 2 * layers * max(1, key_value_heads // shards) * head_dim * size


def _attention_layers(model: dict[str, Any]) -> int | None:
    layers = model.get("num_hidden_layers") or model.get("n_layer")
    if not isinstance(layers, int) or any(model.get(name) for name in UNEVEN):
        return None
    types = model.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        layers = sum(layer_type in ATTENTION_LAYERS for layer_type in types)
    elif any(HYBRID.search(name) for name in model):
        return None
    return layers - int(model.get("num_kv_shared_layers") or 0)


def number_bytes_of(dtype: str) -> int:
    """Bytes of a number of a float type."""
    return SIZES.get(dtype, SMALLEST)


def max_num_seqs_on_gpu(resources: ResourcesConfig, memory: int, name: str) -> int:
    """Most sequences that an engine samples at a time on GPUs with this name and so many bytes of memory."""
    if resources.max_num_seqs is not None:
        return resources.max_num_seqs
    is_large = memory >= LARGE_GPU and "a100" not in name.lower()
    tokens = resources.engine_options.get("max_num_batched_tokens")  # of a step; vLLM refuses fewer than sequences
    if is_large and not (isinstance(tokens, int) and tokens < MAX_NUM_SEQS_ON_LARGE_GPUS):
        return MAX_NUM_SEQS_ON_LARGE_GPUS
    return MAX_NUM_SEQS


def max_num_seqs_on_cpu(resources: ResourcesConfig) -> int:
    """Most sequences that an engine samples at a time on a CPU. It does not follow the memory, because the sizes of batches
    change the rounding of log-probabilities."""
    return resources.max_num_seqs or MAX_NUM_SEQS


def mib_of_engine(shape: dict[str, Any], tokens: int, dtype: str, resources: ResourcesConfig, engines: int = 1) -> int:
    """Size of the cache of each of so many engines on a CPU that compute in ``dtype``, with sequences of at most so many
    tokens."""
    most = most_mib(resources)
    of_one = (shape, tokens, number_bytes_of(dtype), resources.tensor_parallel_size)
    one, all_at_once = mib_needed(*of_one), mib_needed(*of_one, max_num_seqs_on_cpu(resources))
    if resources.kv_cache_mib is not None or one is None or all_at_once is None:
        return most
    return min(most, all_at_once, max(room_mib(resources, engines), one))


def room_mib(resources: ResourcesConfig, engines: int = 1) -> int:
    """Greatest size of an engine's cache on a CPU that one sequence alone does not need."""
    if resources.kv_cache_mib is not None:
        return resources.kv_cache_mib
    share = machine_memory().total // (MIB * PART_OF_MEMORY * engines * resources.tensor_parallel_size)
    return min(MOST_BY_DEFAULT, max(LEAST_ROOM, share))


def most_mib(resources: ResourcesConfig) -> int:
    """Greatest size of an engine's cache on a CPU."""
    return resources.kv_cache_mib or MOST_BY_DEFAULT


def mib_needed(
    shape: dict[str, Any], tokens: int, number_bytes: int | None = None, shards: int = 1, sequences: int = 1
) -> int | None:
    """Smallest ``resources.kv_cache_mib`` for ``sequences`` of so many tokens each: whole blocks, one that vLLM keeps free, and
    with a sliding window one more, as the window may begin inside a block; None for an unknown layout."""
    each = bytes_per_token(shape, number_bytes, shards)
    if each is None:
        return None
    blocks = sequences * -(-tokens // BLOCK) + 1 + _has_sliding_window(shape)
    return -(-each * BLOCK * blocks // MIB)


def _has_sliding_window(shape: dict[str, Any]) -> bool:
    model = {**shape, **(shape.get("text_config") or {})}
    types = model.get("layer_types")
    if isinstance(types, list):
        return any(layer_type in ("sliding_attention", "chunked_attention") for layer_type in types)
    return bool(model.get("sliding_window")) and model.get("use_sliding_window", True)


def too_small(error: BaseException, shape: dict[str, Any], tokens: int, resources: ResourcesConfig) -> str | None:
    """One sentence for an engine that did not start because its cache cannot hold a sequence of ``tokens``; None for others."""
    if not TOO_SMALL.search(str(error)):
        return None
    needed = mib_needed(shape, tokens, shards=resources.tensor_parallel_size)
    words = " ".join(str(error).split())
    return (
        f"the engines' key-value cache cannot hold a sequence of {tokens:,} tokens (the longest prompt and "
        f"generation.max_completion_length): {raise_it(needed, resources)}, or lower generation.max_completion_length or "
        f"prompts.max_prompt_length; vLLM: {words}"
    )


def too_large(error: BaseException) -> str | None:
    """One sentence for an engine that did not start because its cache exceeds the free memory; None for others."""
    if not TOO_LARGE.search(str(error)):
        return None
    words = " ".join(str(error).split())
    return (
        "the engines' key-value caches do not fit into the memory that is free: set a smaller resources.kv_cache_mib, lower "
        f"resources.engines, or end other processes; vLLM: {words}"
    )


def no_room_on_gpu(error: BaseException, tokens: int, resources: ResourcesConfig) -> str | None:
    """One sentence for an engine that did not start because a GPU has too little memory for its model, its cache or a sequence
    of ``tokens`` in it; None for others."""
    words = " ".join(str(error).split())
    part = f"resources.gpu_memory_utilization (it is {resources.engine_memory:g})"
    gpus = f"resources.tensor_parallel_size (it is {resources.tensor_parallel_size})"
    sequences = f"resources.max_num_seqs (it is {resources.max_num_seqs or 'up to 1,024'})"
    if NO_CACHE in words:
        sentence = f"the model leaves an engine no memory for its key-value cache: raise {part} or {gpus}, or lower {sequences}"
    elif TOO_SMALL.search(words):
        sentence = (
            f"an engine's key-value cache cannot hold a sequence of {tokens:,} tokens (the longest prompt and "
            f"generation.max_completion_length): raise {part} or {gpus}, or lower generation.max_completion_length or "
            "prompts.max_prompt_length"
        )
    elif NOT_FREE.search(words):
        sentence = (
            f"less memory of a GPU is free than {part} asks for: end other processes on it, or lower the field, if need be "
            f"with a greater {gpus}"
        )
    elif out_of_memory(error):
        sentence = (
            f"the model does not fit into the memory that is free on a GPU: raise {gpus}, lower {sequences}, or end other "
            "processes on it"
        )
    else:
        return None
    return f"{sentence}; vLLM: {words}"


def raise_it(needed: int | None, resources: ResourcesConfig) -> str:
    """Advice to enlarge the cache."""
    most = most_mib(resources)
    to = "" if needed is None or needed <= most else f" to {needed} or more"
    return f"raise resources.kv_cache_mib{to} (it is {most}; on a GPU raise resources.gpu_memory_utilization)"
