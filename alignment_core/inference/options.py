"""Options of engines that depend on the device and may influence samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignment_core.credentials import cut, resolved
from alignment_core.errors import EnvironmentFault, UserError, first_line, one_line
from alignment_core.inference import kv_cache
from alignment_core.memory import out_of_memory
from alignment_core.recipes.sections.resources import ResourcesConfig

# Eager, because compilation is off on a CPU. Blocks of 32: with the default of 128 a short prompt is never cached. Chunked
# prefill breaks seeded sampling: vLLM then rewinds the random generator, which a CPU generator cannot do.
BY_DEVICE = {"cpu": {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}}
"""Arguments of ``vllm.LLM``, by the kind of device."""


def adapter_options(most: int | None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine that can load one adapter, up to this rank; None: no adapters."""
    return {} if most is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": most}


def started(
    make: Callable[..., Any], folder: Path, dtype: str, tokens: int, resources: ResourcesConfig, device: str
) -> Any:
    """An engine on a ``cpu`` or ``cuda`` device that computes in ``dtype``, with ``resources.engine_options``. Raises UserError
    if vLLM does not accept them, or if its cache on a CPU is too small for a sequence of ``tokens``; EnvironmentFault if the
    memory is too small for its cache, or on a GPU for such a sequence or the model."""
    options = resources.engine_options
    try:
        return make(**resolved(options, "resources.engine_options"))
    except (TypeError, ValueError, RuntimeError) as error:
        if device == "cuda" and (sentence := kv_cache.no_room_on_gpu(error, tokens, resources)):
            raise EnvironmentFault(sentence) from None
        if isinstance(error, RuntimeError):
            raise
        if sentence := kv_cache.too_large(error):
            raise EnvironmentFault(sentence) from None
        shape = {**json.loads((folder / "config.json").read_text()), "dtype": dtype}
        if sentence := kv_cache.too_small(error, shape, tokens, resources):
            raise UserError(sentence) from None
        if not options:
            raise
        reason = cut(one_line(error))
        raise UserError(f"resources.engine_options: vLLM does not accept {', '.join(options)}: {reason}") from None


@contextmanager
def wakes(resources: ResourcesConfig) -> Iterator[None]:
    """Turn a failed allocation inside the block, in which an engine takes back its memory of a GPU, into EnvironmentFault.
    Micro-batches have no part in it: the trainer beside the engine has freed the memory of its last one before."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise EnvironmentFault(
            f"an engine does not get its memory of a GPU back (resources.gpu_memory_utilization: {resources.engine_memory:g}), "
            "because the trainer beside it or another process holds more than the rest: lower the field, leave less in the "
            "trainer (resources.offload_optimizer, zero_stage: 3), or give engines GPUs of their own "
            f"(resources.placement: disaggregated); vLLM: {first_line(error)}"
        ) from error
