"""Rotary positions that depend on the length of a sequence, computed for each sequence as ``transformers`` would alone.

With the types ``dynamic`` (NTK scaling by bloc97 and emozilla) and ``longrope`` (Ding et al. 2024, "LongRoPE") the frequencies
change once a sequence is longer than the model's first training length. ``transformers`` uses the longest position of the whole
batch, and with ``dynamic`` also of earlier batches, so the log-probabilities of a sequence would depend on others in its
micro-batch. vLLM uses ``max_model_len``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn


class RopeLengths:
    """Makes the rotary embeddings of a model use the length of each token's own sequence."""

    def __init__(self, model: nn.Module, context: int | None) -> None:
        """With ``context``, all sequences are computed as if they had this many tokens, as an engine with this
        ``max_model_len`` does; longer ones with their own length."""
        self.context = context
        self.lengths: Tensor | None = None
        """[L, W], length of each token's sequence in the next forward pass; None: as ``transformers`` does."""
        modules = [module for module in model.modules() if any(map(_depends_on_length, _types(module).values()))]
        for module in modules:
            module.forward = functools.partial(self._forward, module)
        self.needed = bool(modules)
        """Whether the model has any such rotary embeddings."""

    def _forward(
        self, module: Any, states: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Output of ``module``, computed for each group of tokens whose sequences have the same frequencies."""
        more = {} if layer_type is None else {"layer_type": layer_type}
        kind = _types(module)[layer_type]
        lengths = self.lengths
        if not _depends_on_length(kind) or (lengths is None and self.context is None):
            return type(module).forward(module, states, position_ids, **more)
        if lengths is None:
            lengths = torch.full_like(position_ids, 1)
        parameters = module.config.rope_parameters
        if kind == "longrope":
            first = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
            groups = lengths.clamp(min=self.context or 0).clamp(first, first + 1)  # two sets of frequencies
        else:
            groups = lengths.clamp(min=max(self.context or 0, module.original_max_seq_len))
        result: tuple[Tensor, ...] = ()
        for length in groups.unique().tolist():
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)  # reset its record of the longest sequence so far
            selected = groups == length
            # The module takes the length from the largest position, so one more token is added that has it.
            positions = torch.cat(
                [position_ids * selected, position_ids.new_full((len(position_ids), 1), length - 1)], dim=1
            )
            output = type(module).forward(module, states, positions, **more)
            parts = [part[:, :-1] for part in ((output,) if isinstance(output, Tensor) else output)]
            result = tuple(
                torch.where(selected[..., None], part, before)
                for part, before in zip(parts, result or parts, strict=True)
            )
        return result[0] if isinstance(output, Tensor) else result


def _types(module: nn.Module) -> dict[str | None, Any]:
    """The types of a rotary embedding, by layer type if these have their own; {None: None} for any other module."""
    kind = getattr(module, "rope_type", None)
    return dict(kind) if isinstance(kind, dict) else {None: kind}


def _depends_on_length(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """Length of the sequence of each token, from positions that restart with each sequence. [L, W] → [L, W]"""
    sequence_N = (position_ids.flatten() == 0).cumsum(0)
    return sequence_N.bincount()[sequence_N].view(position_ids.shape)
