"""Sequence parallelism: the ranks of a group compute each micro-batch together (Jacobs et al. 2023, "DeepSpeed Ulysses").

Each rank holds a slice of the tokens of the line. In a model whose layers are plain causal attention everything but attention
is computed token by token. Before attention the ranks exchange heads for tokens, so that each has all tokens of some heads,
and back after it. The few numbers that a loss needs are gathered, and each rank computes the loss of the whole micro-batch; its
gradient flows back into the rank's own slice, so the sum of gradients over the ranks is that of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from alignment_core.models.prefix_tree import TreeNode
from alignment_core.models.rank_groups import RankGroup, check_divides, neighbours

FIELD = "resources.sequence_parallel_size"
Nodes = tuple[TreeNode, ...]


@dataclass(frozen=True, eq=False)
class SequenceGroup(RankGroup):
    """The ranks that hold the tokens of the micro-batches of this one together; by default this rank alone."""

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [1, H, n, D], key and value [1, G, n, D] of this rank's tokens → those of its heads for all tokens,
        [1, H/P, N, D] and [1, G'/P, N, D]; keys are repeated if P ranks cannot share them evenly."""
        repeats = key_repeats(query.shape[1], key.shape[1], self.size)
        if repeats > 1:
            key, value = (heads.repeat_interleave(repeats, 1) for heads in (key, value))
        query, key, value = (_Exchange.apply(heads, self.processes, True) for heads in (query, key, value))
        return query, key, value

    def by_tokens(self, heads: Tensor) -> Tensor:
        """The output of this rank's heads for all tokens → of all heads for its tokens. [1, N, H/P, D] → [1, n, H, D]"""
        tokens: Tensor = _Exchange.apply(heads.transpose(1, 2), self.processes, False)
        return tokens.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Slice:
    """The tokens of this rank of a line of N tokens, which is padded to a multiple of the ranks."""

    group: SequenceGroup
    tokens: int
    """N."""

    @property
    def padding(self) -> int:
        return -self.tokens % self.group.size

    @property
    def length(self) -> int:
        """Number of this rank's tokens, n."""
        return (self.tokens + self.padding) // self.group.size

    @property
    def start(self) -> int:
        return self.group.rank * self.length

    def of(self, line: Tensor) -> Tensor:
        """[1, N, ...] → [1, n, ...], with zeros for padding."""
        part = line[:, self.start : self.start + self.length]
        missing = self.length - part.shape[1]
        if not missing:
            return part
        return torch.cat([part, part.new_zeros(1, missing, *part.shape[2:])], 1)

    def padded(self, nodes: Nodes) -> Nodes:
        """The trees of the padded line: padding is one that no token sees."""
        end = self.tokens + self.padding
        return (*nodes, TreeNode(self.tokens, end, end)) if self.padding else nodes

    def here(self, places_K: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some places of the line are here [k], as indices, and their places in the slice [k]."""
        here_k = ((places_K >= self.start) & (places_K < self.start + self.length)).nonzero()[:, 0]
        return here_k, places_K[here_k] - self.start

    def gathered(self, numbers: Tensor, here_k: Tensor, count: int) -> Tensor:
        """The numbers of some places, of which this rank has those ``here_k``. [k, ...] → [K, ...]

        Each rank must compute the same from them: the gradient is that by its own ones.
        """
        whole: Tensor = _Gather.apply(numbers, here_k, count, self.group.processes)
        return whole

    def whole(self, numbers: Tensor) -> Tensor:
        """Of all tokens of the line without its padding, as :meth:`gathered`. [n, ...] → [N, ...]"""
        padded = self.tokens + self.padding
        here = torch.arange(self.start, self.start + self.length, device=numbers.device)
        return self.gathered(numbers, here, padded)[: self.tokens]


class _Exchange(torch.autograd.Function):
    """[1, H, n, D] of this rank's tokens → [1, H/P, P·n, D] of its heads (``to_heads``), or the reverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Any, to_heads: bool) -> Tensor:
        ctx.processes = processes
        ctx.to_heads = to_heads
        return _exchanged(tensor, processes, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradients[0], ctx.processes, not ctx.to_heads), None, None


def _exchanged(tensor: Tensor, processes: Any, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size(processes)
    _, heads, tokens, size = tensor.shape
    if to_heads:
        sent = tensor.reshape(ranks, heads // ranks, tokens, size).contiguous()
    else:
        sent = tensor[0].unflatten(1, (ranks, tokens // ranks)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)  # [P, heads, tokens, D], from each rank in turn
    dist.all_to_all_single(received, sent, group=processes)
    return (received.transpose(0, 1).flatten(1, 2) if to_heads else received.flatten(0, 1))[None]


class _Gather(torch.autograd.Function):
    """See :meth:`Slice.gathered`."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, here_k: Tensor, count: int, processes: Any) -> Tensor:
        ctx.save_for_backward(here_k)
        whole = numbers.new_zeros(count, *numbers.shape[1:])
        whole[here_k] = numbers
        dist.all_reduce(whole, group=processes)  # every place is zero on all ranks but one
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (here_k,) = ctx.saved_tensors
        return gradients[0][here_k], None, None, None


def key_repeats(heads: int, keys: int, ranks: int) -> int:
    """How often each of the key heads is repeated, so that the ranks have equally many, and each those of its query heads."""
    return next(count for count in range(1, heads // keys + 1) if keys * count % ranks == 0)


def sequence_group(size: int, seconds: float) -> SequenceGroup:
    """This rank's group of ``size`` neighbouring ranks, whose collectives have so many ``seconds``. Collective over all ranks.

    Raises UserError if the ranks are no multiple of it.
    """
    if size == 1:
        return SequenceGroup()
    check_divides(size, FIELD)
    return SequenceGroup(size, dist.get_rank() % size, neighbours(size, seconds))
