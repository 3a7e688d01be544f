"""What engines are told that depends on the device and may change what is sampled."""

from __future__ import annotations

from typing import Any

# Blocks of 32: the default of 128 never caches a short prompt. A prompt in chunks breaks seeded sampling: vLLM then rewinds
# the random generator, which a CPU generator cannot do.
BY_DEVICE = {"cpu": {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}}
"""Arguments of ``vllm.LLM``, by the kind of device."""


def adapter_options(most: int | None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine that takes one adapter of this rank at most; None: none."""
    return {} if most is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": most}
