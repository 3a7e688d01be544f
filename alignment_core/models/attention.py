"""Attention over prefix trees: each token sees those that its sequences have before it, and no others.

A tree is computed node by node. A node's tokens see each other causally; all that continues the node sees all of it. Every
such block is a call of PyTorch's flash kernel without a mask, and what the blocks of a token give is joined by their
log-sum-exps (Dao et al. 2022, "FlashAttention"), so that no mask of all tokens by all is ever made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from alignment_core.errors import UserError
from alignment_core.models.prefix_tree import Node, lay_out

logger = logging.getLogger(__name__)

NAME = "prefix_tree"
"""Of this attention, for ``transformers``."""
OTHER_KINDS = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""What ``transformers`` tells an attention that is more than a softmax over all that came before."""

LONGEST_IN_A_BATCH = 32
LEAST_FILLED = 0.8
"""Nodes that are not longer, and have so much of the length of the longest, are one call together: each call of its own
costs as much as some tens of tokens."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_in_use = False
"""Whether a forward pass over trees begins, which needs no mask."""
_seen: list[bool] | None = None
"""While a model is looked at: of each call, whether it is attention of the plain kind over trees."""


class TreeAttention(torch.autograd.Function):
    """Query [1, H, N, D], key and value [1, G, N, D] of a layout's nodes → [1, H, N, D]; G divides H."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float | None
    ) -> Tensor:
        output = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for block in _own_blocks(nodes):
            found, its = _forward(*(block.of(one) for one in (query, key, value)), 0.0, True, scale=scale)
            block.put(output, found)
            block.put(sums, its)
        for node, below in _with_descendants(nodes):
            more, its = _forward(query[:, :, below], key[:, :, node], value[:, :, node], 0.0, False, scale=scale)
            both = torch.logaddexp(sums[:, :, below], its)
            output[:, :, below] *= (sums[:, :, below] - both).exp()[..., None]
            output[:, :, below] += more * (its - both).exp()[..., None]
            sums[:, :, below] = both
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.nodes, ctx.scale = nodes, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        wholes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for block in _own_blocks(ctx.nodes):
            given = [block.of(one) for one in (query, key, value, output, sums)]
            parts = _backward(block.of(gradient, fill=0.0), *given, 0.0, True, scale=ctx.scale)
            for whole, part in zip(wholes, parts, strict=True):
                block.put(whole, part)
        for node, below in _with_descendants(ctx.nodes):
            given = [query[:, :, below], key[:, :, node], value[:, :, node], output[:, :, below], sums[:, :, below]]
            parts = _backward(gradient[:, :, below], *given, 0.0, False, scale=ctx.scale)
            for whole, at, part in zip(wholes, (below, node, node), parts, strict=True):
                whole[:, :, at] += part
        return (*wholes, None, None)


@dataclass(frozen=True)
class _Run:
    """The tokens of one node."""

    places: slice

    def of(self, whole: Tensor, fill: float | None = None) -> Tensor:
        """Its part of [1, H, N, …]: [1, H, T, …]."""
        return whole[:, :, self.places]

    def put(self, whole: Tensor, part: Tensor) -> None:
        whole[:, :, self.places] = part


@dataclass(frozen=True)
class _Batch:
    """The tokens of B nodes of about the same length T, which one call takes."""

    places: Tensor
    """[B, T]; what a shorter node lacks is its last token once more: it comes later than all others, so none sees it."""
    real: Tensor
    """[B, T]"""

    def of(self, whole: Tensor, fill: float | None = None) -> Tensor:
        """Its part of [1, H, N, …]: [B, H, T, …]; ``fill`` is what stands where a node is shorter."""
        part = whole[0].transpose(0, 1)[self.places]
        if fill is not None:
            part[~self.real] = fill
        return part.transpose(1, 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        whole[0].transpose(0, 1)[self.places[self.real]] = part.transpose(1, 2)[self.real]


@functools.lru_cache(maxsize=4)
def _own_blocks(nodes: tuple[Node, ...]) -> list[_Run | _Batch]:
    """The nodes, by the calls in which their tokens see each other."""
    blocks: list[_Run | _Batch] = []
    waiting = sorted(nodes, key=lambda node: node.end - node.start)
    while waiting:
        together = [waiting.pop()]
        length = together[0].end - together[0].start
        while length <= LONGEST_IN_A_BATCH and waiting and waiting[-1].end - waiting[-1].start >= LEAST_FILLED * length:
            together.append(waiting.pop())
        if len(together) == 1:
            blocks.append(_Run(slice(*together[0][:2])))
        else:
            starts, ends = (torch.tensor([node[side] for node in together])[:, None] for side in (0, 1))
            places = starts + torch.arange(length)
            blocks.append(_Batch(places.minimum(ends - 1), places < ends))
    return blocks


def _with_descendants(nodes: Sequence[Node]) -> Iterator[tuple[slice, slice]]:
    """The places of each node that something continues, and of all that does."""
    return ((slice(start, end), slice(end, last)) for start, end, last in nodes if last > end)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    nodes: tuple[Node, ...] | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What ``transformers`` calls; without ``nodes`` it is its own attention."""
    if _seen is not None:
        plain = (
            not dropout and all(more.get(name) is None for name in OTHER_KINDS) and more.get("is_causal") is not False
        )
        causal = getattr(module, "is_causal", True) and query.shape[-1] == value.shape[-1]
        _seen.append(nodes is not None and plain and causal)
    if nodes is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    return TreeAttention.apply(query, key, value, nodes, scaling).transpose(1, 2).contiguous(), None


def _mask(*arguments: Any, **options: Any) -> Any:
    return None if _in_use else sdpa_mask(*arguments, **options)


transformers.AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def over_trees() -> Iterator[None]:
    """For a forward pass that is given ``nodes``."""
    global _in_use
    before, _in_use = _in_use, True
    try:
        yield
    finally:
        _in_use = before


def use_trees(model: Any) -> bool:
    """Let a ``transformers`` model attend over prefix trees if it can, and say whether it does.

    It can if all its layers attend in the plain way and it then gives what it gives for a sequence alone. Otherwise it stays
    as it was.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        return before == NAME
    sequences = _sequences(model)
    alone = _states(model, sequences[-1:])
    model.config._attn_implementation = NAME
    can = _is_plain(model, sequences[-1]) and _are_kept_apart(model, share=True)
    can = can and _close(_states(model, sequences, share=True), alone, 0.5)
    if not can:
        model.config._attn_implementation = before
        _say_once(model.config.model_type)
    return can


@functools.cache
def _say_once(model_type: str) -> None:
    logger.warning(
        "a %s model keeps the attention of transformers, each sequence for itself: its own is not plain causal attention",
        model_type,
    )


def check_kept_apart(model: Any) -> None:
    """Raise UserError if a sequence in a line of several is not what it is alone: if a layer carries something over."""
    if not _are_kept_apart(model, share=False):
        raise UserError(
            f"model: a layer of a {model.config.model_type} model carries its state from one sequence of a micro-batch into "
            "the next, so that it cannot be trained on packed sequences; choose a model whose layers all attend"
        )


def _are_kept_apart(model: Any, share: bool) -> bool:
    """Whether a sequence stays as it is when the one before it changes."""
    first, second, mine = _sequences(model)
    return _close(_states(model, [first, mine], share), _states(model, [second, mine], share), 0.75)


def _sequences(model: Any) -> list[np.ndarray]:
    """Three that begin alike, in their order in a prefix tree."""
    vocabulary = model.config.get_text_config().vocab_size
    return [np.array([*range(20), *[after] * 4]) % vocabulary for after in (1, 2, 3)]


def _is_plain(model: Any, sequence: np.ndarray) -> bool:
    """Whether each layer calls :func:`_attend` for a causal softmax over all that came before, and nothing more."""
    global _seen
    training, _seen = model.training, []
    try:
        with torch.random.fork_rng(devices=[]):
            _states(model.train(), [sequence], share=True)
        return all(_seen) and len(_seen) == model.config.get_text_config().num_hidden_layers
    except TypeError:  # somebody else's model that knows nothing of ``nodes``
        return False
    finally:
        _seen = None
        model.train(training)


def _states(model: Any, sequences: Sequence[np.ndarray], share: bool = False) -> Tensor:
    """Hidden states after the last layer, of the tokens of the last sequence. [T, H]"""
    if share:
        layout = lay_out(sequences)
        ids, positions, places, more = layout.ids, layout.positions, layout.places[-1], {"nodes": layout.nodes}
    else:
        ids, positions = np.concatenate(sequences), np.concatenate([np.arange(len(one)) for one in sequences])
        places, more = np.arange(len(ids) - len(sequences[-1]), len(ids)), {}
    with torch.no_grad(), over_trees() if share else nullcontext():
        output = model.base_model(
            input_ids=torch.from_numpy(ids)[None].to(model.device),
            position_ids=torch.from_numpy(positions)[None].to(model.device),
            use_cache=False,
            **more,
        )
    return output.last_hidden_state[0, places]


def _close(one: Tensor, other: Tensor, digits: float) -> bool:
    """Whether they agree in this share of the digits that their type has. What is no number says nothing against it."""
    return not (one.float() - other.float()).norm() > torch.finfo(one.dtype).eps ** digits * other.float().norm()
