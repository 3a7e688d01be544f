"""``vllm.SamplingParams`` from the sampling parameters of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignment_core.recipes.sections.rollout import GenerationConfig


def parameters_of(config: GenerationConfig, stop_ids: Sequence[int], seed: int, **more: Any) -> Any:
    """The parameters for one prompt; ``more`` are further parameters by vLLM's names, or another ``max_tokens``."""
    import vllm

    return vllm.SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        seed=None if config.temperature == 0 else seed,
        logprobs=0,  # of the sampled tokens only
        flat_logprobs=True,  # columns instead of a dict for each token
        stop_token_ids=list(stop_ids),
        detokenize=bool(config.stop),
        stop=list(config.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a stop text may contain them
        **{"max_tokens": config.max_completion_length, **more},
    )
