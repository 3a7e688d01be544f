"""Attention over prefix trees on CUDA: one call of FlexAttention (Dong et al. 2024), which skips blocks that no token sees.

The tokens of a tree lie in depth-first order, so a token is seen by itself and by the tokens after it up to the end of its
node's descendants. FlexAttention's mask consists of these intervals, one for each token; blocks of tokens that lie outside of
all intervals are skipped.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.flex_attention import flex_attention_forward

from alignment_core.memory import out_of_memory
from alignment_core.models.prefix_tree import TreeNode, lay_out

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens of a block, FlexAttention's own choice."""
COMPILATIONS = 64
"""In one process. Each type, number of heads and head size has its own, with and without gradients; beyond torch's limit of 8
it would compute without compiling, with the scores of all tokens by all tokens in memory."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[TreeNode, ...], scale: float | None
) -> Tensor:
    """Query [1, H, N, D], key and value [1, G, N, D] of a layout's nodes → [1, N, H, D]; G divides H."""
    with _compilations():
        output: Tensor = flex_attention_forward(module, query, key, value, block_mask(nodes, query.device), scale)[0]
    return output


@functools.cache
def _compilations() -> AbstractContextManager[None]:
    """A context, not a setting made once: settings of torch's compiler count in their own thread, and checkpointed layers run
    again in one of the backward pass."""
    context: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=COMPILATIONS)
    return context


@functools.lru_cache(maxsize=4)
def block_mask(nodes: tuple[TreeNode, ...], device: torch.device) -> BlockMask:
    """Visibility of a layout's tokens to each other. Made once for all layers."""
    seen_until = _seen_until(nodes)
    tokens = len(seen_until)
    starts = np.arange(0, tokens, BLOCK)
    # Rows are blocks of queries, columns blocks of keys. The intervals of a block's tokens overlap, so their union is one
    # interval, from the block's start to the farthest end.
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


def visible(nodes: tuple[TreeNode, ...], device: torch.device) -> Tensor:
    """Which tokens [N] of a layout see which: a mask [1, 1, N, N] for ``scaled_dot_product_attention``."""
    until = torch.from_numpy(_seen_until(nodes)).to(device)
    places = torch.arange(len(until), device=device)
    return ((places <= places[:, None]) & (places[:, None] < until))[None, None]


def _seen_until(nodes: tuple[TreeNode, ...]) -> np.ndarray:
    """The end of the tokens that see each token. [N]"""
    return np.repeat([last for _, _, last in nodes], [end - start for start, end, _ in nodes])


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row of [R, C]: how many columns are chosen [1, 1, R], and all columns, chosen ones first [1, 1, R, C]."""
    columns = np.argsort(~chosen, axis=1, kind="stable")
    counts = chosen.sum(1)
    return tuple(torch.from_numpy(part.astype(np.int32)).to(device)[None, None] for part in (counts, columns))  # type: ignore[return-value]


@functools.cache
def works(device: str, dtype: torch.dtype, heads: int, groups: int, size: int) -> bool:
    """Whether this device computes correctly for ``heads`` of ``size`` dimensions and ``groups`` of keys; if not, log why.

    It is tried on two trees of different sizes, because the compiler treats the number of tokens as fixed at first.
    """
    try:
        differs = torch.stack([_difference(device, dtype, heads, groups, size, answer) for answer in (40, 90)]).max()
    except Exception as error:  # compilers, drivers and kernels raise all kinds
        if out_of_memory(error):
            raise
        logger.warning(
            "FlexAttention does not run on this device (%s): %s", type(error).__name__, str(error).split("\n")[0]
        )
        logger.debug("FlexAttention", exc_info=error)
        return False
    if differs <= torch.finfo(dtype).eps ** 0.5:  # false for NaN
        return True
    logger.warning("FlexAttention on this device differs by %.1g from attention with a mask", differs)
    return False


def _difference(device: str, dtype: torch.dtype, heads: int, groups: int, size: int, answer: int) -> Tensor:
    """Largest relative difference of the output or a gradient from those of attention with a mask."""
    ids = [np.concatenate([np.zeros(prompt, int), np.full(answer, n)]) for prompt in (150, 30) for n in (1, 2, 3)]
    layout, generator = lay_out(ids), torch.Generator().manual_seed(0)
    tokens = len(layout.ids)
    query, key, value = inputs = tuple(
        torch.randn(1, count, tokens, size, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads, groups, groups)
    )
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for places in map(torch.from_numpy, layout.places):
        mask[places[:, None], places] |= torch.ones(len(places), len(places), dtype=torch.bool).tril()
    module = torch.nn.Identity()
    output = attend(module, query, key, value, layout.nodes, None).transpose(1, 2)
    expected = scaled_dot_product_attention(query, key, value, mask.to(device), enable_gqa=True)
    with torch.no_grad():
        frozen = attend(module.eval(), query, key, value, layout.nodes, None).transpose(1, 2)
    direction = torch.randn(expected.shape, generator=generator).to(expected)
    gradients = [torch.autograd.grad(result, inputs, direction) for result in (output, expected)]
    pairs = [(output, expected), (frozen, expected), *zip(*gradients, strict=True)]
    errors = [(result - reference).float().norm() / reference.float().norm() for result, reference in pairs]
    return torch.stack(errors).detach().max()
