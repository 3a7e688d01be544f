"""Attention of ``transformers`` by the package flash-attn (Dao 2023, "FlashAttention-2"), for sequences that share no prefix.

Its kernel for sequences of different lengths takes their bounds instead of a mask, which of N tokens has N × N numbers.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from alignment_core.errors import EnvironmentFault, UserError, one_line
from alignment_core.models.image_text import reads_images

NAME = "flash_attention_2"
"""Its name in ``transformers`` and in recipes."""
FIELD = f"resources.attention: {NAME}"


def check_flash_attention(device: str) -> None:
    """Raise UserError on a ``device`` that has no such kernel, and EnvironmentFault without the package."""
    if device == "cpu":
        raise UserError(f"{FIELD} computes on GPUs alone: leave it out on a CPU")
    if importlib.util.find_spec("flash_attn") is None:
        raise EnvironmentFault(
            f"{FIELD} needs the package flash-attn, which is not installed: `pip install flash-attn`, or leave the field out"
        )


def use_flash_attention(model: Any) -> None:
    """Let a ``transformers`` model attend by this kernel; of an image-text model, the language model. Raises UserError if it
    does not support it."""
    try:
        model.set_attn_implementation({"text_config": NAME} if reads_images(model) else NAME)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"{FIELD} does not work for a {model.config.model_type} model: leave it out; transformers: {one_line(error)}"
        ) from None


def bounds(position_ids: Tensor) -> dict[str, Any]:
    """Options of a forward pass over one line of sequences, whose positions [1, N] start at 0 each: their bounds, which
    ``transformers`` would look for in each layer, and wait for the GPU each time."""
    starts = (position_ids[0] == 0).nonzero()[:, 0]
    cumulated = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])]).to(torch.int32)
    longest = int(cumulated.diff().max())
    return {
        "cu_seq_lens_q": cumulated,
        "cu_seq_lens_k": cumulated,
        "max_length_q": longest,
        "max_length_k": longest,
    }
