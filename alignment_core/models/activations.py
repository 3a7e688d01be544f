"""What the backward pass computes again, in exchange for memory."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Recomputed = Literal["all", "selective"]
"""``all``: everything within a layer; ``selective``: what is neither a matrix product nor attention, such as norms, rotary
positions and activation functions, which take half of the memory and a few percent of the time, and on a GPU FlexAttention."""
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_ATTENTION = ("aten::_scaled_dot_product", "alignment::tree_attention")
"""The policy does not see FlexAttention, which is a compiled region. With ``torch._inductor.config``'s
``wrap_inductor_compiled_regions`` it would, and would keep queries, keys and values beside the output."""


def recompute(model: Any, what: Recomputed) -> None:
    """Let the layers of a ``transformers`` model compute their activations again in the backward pass. The gradient is the
    same, bit by bit."""
    # Reentrant checkpointing needs an input with a gradient, and frozen embeddings (LoRA) have none.
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _policy(_context: Any, operator: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    name = operator.name()
    is_kept = name.removeprefix("aten::").partition(".")[0] in _PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
