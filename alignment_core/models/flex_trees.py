"""Attention over prefix trees on CUDA: one call of FlexAttention (Dong et al. 2024), which skips what nobody sees.

The tokens of a tree lie in depth-first order, so a token is seen by itself and by what comes after it up to the end of all
that continues its node. That is an interval for each token, and FlexAttention's mask is those intervals: exactly for tokens,
and for blocks of tokens to say which of them need no look at all.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.flex_attention import flex_attention_forward

from alignment_core.memory import out_of_memory
from alignment_core.models.prefix_tree import Node, lay_out

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens of a block, FlexAttention's own choice."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float | None
) -> Tensor:
    """Query [1, H, N, D], key and value [1, G, N, D] of a layout's nodes → [1, N, H, D]; G divides H."""
    output: Tensor = flex_attention_forward(module, query, key, value, block_mask(nodes, query.device), scale)[0]
    return output


@functools.lru_cache(maxsize=4)
def block_mask(nodes: tuple[Node, ...], device: torch.device) -> BlockMask:
    """Who sees whom among the tokens of a layout. It is made once for all layers."""
    seen_until = np.repeat([last for _, _, last in nodes], [end - start for start, end, _ in nodes])
    tokens = len(seen_until)
    starts = np.arange(0, tokens, BLOCK)
    # By blocks of those who look (rows) and of what is seen (columns). The intervals of a block's tokens overlap, so that
    # together they are one, from the block's start to the farthest end.
    any_sees = (starts[:, None] >= starts) & (starts[:, None] < np.maximum.reduceat(seen_until, starts))
    all_see = (starts[:, None] > starts) & (starts[:, None] + BLOCK <= np.minimum.reduceat(seen_until, starts))
    until = torch.from_numpy(seen_until).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    return BlockMask.from_kv_blocks(
        *_listed(any_sees & ~all_see, device),
        *_listed(all_see, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row of [R, C]: how many are chosen [1, 1, R], and the columns, those first [1, 1, R, C]."""
    columns = np.argsort(~chosen, axis=1, kind="stable")
    return tuple(torch.from_numpy(one.astype(np.int32)).to(device)[None, None] for one in (chosen.sum(1), columns))  # type: ignore[return-value]


@functools.cache
def works(device: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> bool:
    """Whether this device computes what it should for ``heads`` of ``size`` dimensions, ``groups`` of keys; if not, say why.

    It is tried on two trees, of which the second makes the compiler see that the number of tokens changes.
    """
    try:
        differs = torch.stack([_difference(device, dtype, heads, groups, size, answer) for answer in (40, 90)]).max()
    except Exception as error:  # whatever compilers, drivers and kernels raise
        if out_of_memory(error):
            raise
        logger.warning(
            "FlexAttention does not run on this device (%s): %s", type(error).__name__, str(error).split("\n")[0]
        )
        logger.debug("FlexAttention", exc_info=error)
        return False
    if differs <= torch.finfo(dtype).eps ** 0.5:  # not if it is no number
        return True
    logger.warning("FlexAttention on this device differs by %.1g from attention with a mask", differs)
    return False


def _difference(device: str, dtype: torch.dtype, heads: int, groups: int, size: int, answer: int) -> Tensor:
    """By how much output or a gradient differ from those of attention with a mask, in parts of their norms."""
    ids = [np.concatenate([np.zeros(prompt, int), np.full(answer, n)]) for prompt in (150, 30) for n in (1, 2, 3)]
    layout, generator = lay_out(ids), torch.Generator().manual_seed(0)
    tokens = len(layout.ids)
    query, key, value = given = tuple(
        torch.randn(1, count, tokens, size, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads, groups, groups)
    )
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for places in map(torch.from_numpy, layout.places):
        mask[places[:, None], places] |= torch.ones(len(places), len(places), dtype=torch.bool).tril()
    module = torch.nn.Identity()
    found = attend(module, query, key, value, layout.nodes, None).transpose(1, 2)
    wanted = scaled_dot_product_attention(query, key, value, mask.to(device), enable_gqa=True)
    with torch.no_grad():
        frozen = attend(module.eval(), query, key, value, layout.nodes, None).transpose(1, 2)
    direction = torch.randn(wanted.shape, generator=generator).to(wanted)
    gradients = [torch.autograd.grad(one, given, direction) for one in (found, wanted)]
    pairs = [(found, wanted), (frozen, wanted), *zip(*gradients, strict=True)]
    return torch.stack([(one - other).float().norm() / other.float().norm() for one, other in pairs]).detach().max()
