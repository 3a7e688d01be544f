"""Comparison of an engine's log-probabilities with those of ``transformers``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from alignment_core.inference.completions import Completion
from alignment_core.models.model_ref import Model


def mean_difference(
    model: Model,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    dtype: str,
    max_length: int,
    own_gpu: bool,
    images: Sequence[Sequence[Path]] = (),
    never_sampled: Collection[int] = (),
) -> float:
    """Mean absolute difference, in nats, between the log-probabilities of completions and those that ``model`` gives their
    tokens. The largest one would be that of rounding: in bf16 a logit between 16 and 32 is a multiple of 1/8.

    This takes a second copy of the model: on the engine's GPU if that is its ``own_gpu`` and has room, otherwise in the CPU's
    memory. ``dtype`` is the float type in which the engine computes, ``max_length`` its longest sequence. ``images`` are the
    paths of each prompt's images, if any prompt has some; the engine gives tokens that are ``never_sampled`` no probability.
    """
    import torch

    from alignment_core.losses.logprobs import token_logps
    from alignment_core.models.image_text import ImageInputs
    from alignment_core.models.rope import RopeLengths

    reference = model.load("lm", torch.float32 if dtype == "float32" else torch.bfloat16).eval()
    RopeLengths(reference, max_length)
    size = sum(parameter.nbytes for parameter in reference.parameters())
    if own_gpu and 2 * size < torch.cuda.mem_get_info()[0]:
        reference = reference.to("cuda")
    image_inputs = ImageInputs(reference, model.image_processor) if any(images) else None
    differences = []
    for prompt, completion, files in zip(prompts, completions, images or [()] * len(prompts), strict=True):
        # One sequence at a time and without a cache: this is the plain computation that the engine is compared with.
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=reference.device)
        more = image_inputs.options(tuple(map(str, files)), ids) if image_inputs is not None and files else {}
        with torch.no_grad():
            logits = reference(input_ids=ids, use_cache=False, **more).logits[0, len(prompt) - 1 : -1]
        logits[:, list(never_sampled)] = float("-inf")
        expected = token_logps(logits, ids[0, len(prompt) :]).cpu().numpy()
        differences.append(np.abs(expected - completion.logps))
    return float(np.concatenate(differences).mean())
