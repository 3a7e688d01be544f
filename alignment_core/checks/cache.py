"""The key-value cache that the longest sequence of a stage needs, on this machine's processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from alignment_core.cluster.device import inference_dtype_on_cpu
from alignment_core.inference.kv_cache import mib_needed, most_mib, number_bytes_of, raise_it
from alignment_core.models.saving import dtype_of
from alignment_core.recipes import ResourcesConfig


class Need(BaseModel):
    """The least cache that a stage needs."""

    stage: str
    tokens: int
    """Prompt and completion of a sequence that will certainly be sampled."""
    mib: int

    def problem(self, resources: ResourcesConfig) -> str | None:
        """A sentence if the engines have less."""
        if self.mib <= most_mib(resources):
            return None
        return (
            f"{self.stage}: a sequence of {self.tokens:,} tokens (the longest prompt and max_completion_length) needs "
            f"{self.mib} MiB of the engines' key-value cache: {raise_it(self.mib, resources)}, or lower "
            "generation.max_completion_length or prompts.max_prompt_length"
        )

    def sentence(self, resources: ResourcesConfig) -> str:
        """The line below a table of stages."""
        return (
            f"{self.stage}: {self.mib} of {most_mib(resources)} MiB of each engine's key-value cache for a sequence of "
            f"{self.tokens:,} tokens"
        )


def needs(
    stage: str,
    tokens: int,
    shape: dict[str, Any],
    resources: ResourcesConfig,
    trained: bool,
    dtype: str | None = None,
) -> Iterator[Need]:
    """The need of a stage, if the model's shape is known. Its engines compute in ``dtype``, by default as the policy is stored;
    one that a run trains may be stored in bf16 or fp32, of which the smaller one is assumed."""
    if "kv_cache_dtype" in resources.engine_options:  # other bytes per number than the model
        return
    dtype = inference_dtype_on_cpu(dtype or ("bfloat16" if trained else dtype_of(shape)))
    needed = mib_needed(shape, tokens, number_bytes_of(dtype), resources.tensor_parallel_size) if shape else None
    if needed is not None:
        yield Need(stage=stage, tokens=tokens, mib=needed)
