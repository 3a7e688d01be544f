"""Attention over prefix trees: each token sees the tokens before it in its own sequences, and no others.

On a CPU a tree is computed node by node. A node's tokens see each other causally; its descendants see all of it. Every such
block is a call of PyTorch's flash kernel without a mask. The outputs of a token's blocks are combined by their log-sum-exps
(Dao et al. 2022, "FlashAttention"), so a mask of all tokens by all tokens is never made. On CUDA
:mod:`~alignment_core.models.flex_trees` computes it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from alignment_core.errors import UserError
from alignment_core.memory import out_of_memory
from alignment_core.models import flex_trees
from alignment_core.models.image_text import of_axes
from alignment_core.models.layer_kinds import first_layers
from alignment_core.models.prefix_tree import TreeNode, lay_out
from alignment_core.models.sequence import FIELD, key_repeats

if TYPE_CHECKING:
    from alignment_core.models.loading import Head
    from alignment_core.models.sequence import SequenceGroup

logger = logging.getLogger(__name__)

NAME = "prefix_tree"
"""Name of this attention in ``transformers``."""
HARMLESS_OPTIONS = {
    "position_ids",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
"""Options that ``transformers`` may pass to a plain causal attention. Any other changes it: a window, a soft cap, sinks,
selected blocks."""

LONGEST_IN_A_BATCH = 32
LEAST_FILLED = 0.8
"""Nodes up to ``LONGEST_IN_A_BATCH`` tokens are computed in one call if they have at least this fraction of the longest one's
length: a call of its own costs as much as some tens of tokens."""

_in_use = False
"""Whether a forward pass over trees is running, which needs no mask."""
_probing = False
"""Whether it is that of a probe. On a GPU it then computes attention with a mask: a probe is about the model, and
:func:`~alignment_core.models.flex_trees.works` about the device."""
Heads = tuple[int, int, int]
"""Of an attention: query heads, key heads, and dimensions per head."""
_seen: list[Heads | None] | None = None
"""While a model is probed: the heads of each attention call, None for one that is not plain."""


class _Kernels(NamedTuple):
    forward: Any
    backward: Any


@functools.cache
def _kernels() -> _Kernels:
    """PyTorch's flash kernel for CPUs, whose names are private: a build without them computes on GPUs all the same."""
    aten = torch.ops.aten
    return _Kernels(
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


class TreeAttention(torch.autograd.Function):
    """Query [1, H, N, D], key and value [1, G, N, D] of a layout's nodes → [1, H, N, D]; G divides H.

    Computed in single precision at least: PyTorch's kernel for bf16 is slower than the one for fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[TreeNode, ...], scale: float | None
    ) -> Tensor:
        places = [place for node in nodes for place in node]
        output, sums = torch.ops.alignment.tree_attention(query, key, value, places, scale)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.nodes = nodes
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *given, sums = ctx.saved_tensors
        query, key, value, output, gradient = map(_single, (*given, gradient))
        wholes = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for block in _own_blocks(ctx.nodes):
            saved = tuple(map(block.of, (query, key, value, output, sums)))
            parts = _kernels().backward(block.of(gradient, fill=0.0), *saved, 0.0, True, scale=ctx.scale)
            for whole, part in zip(wholes, parts, strict=True):
                block.put(whole, part)
        for node, below in _with_descendants(ctx.nodes):
            saved = (query[:, :, below], key[:, :, node], value[:, :, node], output[:, :, below], sums[:, :, below])
            parts = _kernels().backward(gradient[:, :, below], *saved, 0.0, False, scale=ctx.scale)
            for whole, at, part in zip(wholes, (below, node, node), parts, strict=True):
                whole[:, :, at] += part
        return (*(whole.to(given[0].dtype) for whole in wholes), None, None)


_operators = torch.library.Library("alignment", "DEF")
_operators.define(
    "tree_attention(Tensor query, Tensor key, Tensor value, int[] nodes, float? scale) -> (Tensor, Tensor)"
)


@torch.library.impl(_operators, "tree_attention", "CPU")
def _tree_attention(
    query: Tensor, key: Tensor, value: Tensor, places: list[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exps [1, H, N]. A single operator of PyTorch, so that checkpointed activations keep its result
    and do not look at each of the hundreds of operators in it."""
    dtype = query.dtype
    nodes = tuple(TreeNode(*places[at : at + 3]) for at in range(0, len(places), 3))
    query, key, value = map(_single, (query, key, value))
    output = torch.empty_like(query)
    sums = output.new_empty(query.shape[:3])
    for block in _own_blocks(nodes):
        block_output, block_sums = _kernels().forward(*map(block.of, (query, key, value)), 0.0, True, scale=scale)
        block.put(output, block_output)
        block.put(sums, block_sums)
    for node, below in _with_descendants(nodes):
        node_output, node_sums = _kernels().forward(
            query[:, :, below], key[:, :, node], value[:, :, node], 0.0, False, scale=scale
        )
        both = torch.logaddexp(sums[:, :, below], node_sums)
        output[:, :, below] *= (sums[:, :, below] - both).exp()[..., None]
        output[:, :, below] += node_output * (node_sums - both).exp()[..., None]
        sums[:, :, below] = both
    return output.to(dtype), sums


def _single(tensor: Tensor) -> Tensor:
    """The tensor in single precision at least, with stride 1 in its last dimension: the flash kernel ignores that stride and
    would read other numbers."""
    single = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return single if single.stride(-1) == 1 else single.contiguous()


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
    """The tokens of B nodes of about the same length T, computed in one call."""

    places: Tensor
    """[B, T]; a shorter node is padded with its last token, which no other token sees, because it is the last."""
    real: Tensor
    """[B, T]"""

    def of(self, whole: Tensor, fill: float | None = None) -> Tensor:
        """Its part of [1, H, N, …]: [B, H, T, …]; ``fill`` is the value of padding."""
        part = whole[0].transpose(0, 1)[self.places]
        if fill is not None:
            part[~self.real] = fill
        return part.transpose(1, 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        whole[0].transpose(0, 1)[self.places[self.real]] = part.transpose(1, 2)[self.real].to(whole.dtype)


@functools.lru_cache(maxsize=4)
def _own_blocks(nodes: tuple[TreeNode, ...]) -> list[_Run | _Batch]:
    """The nodes, grouped by the calls that compute attention within them."""
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


def _with_descendants(nodes: Sequence[TreeNode]) -> Iterator[tuple[slice, slice]]:
    """The places of each node that has descendants, and of the descendants."""
    return ((slice(start, end), slice(end, last)) for start, end, last in nodes if last > end)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    nodes: tuple[TreeNode, ...] | None = None,
    sequence_group: SequenceGroup | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention that ``transformers`` calls; its own one without ``nodes``. Raises RuntimeError if the model lost them.

    With a ``sequence_group`` the tokens are a slice of those of the nodes, see :mod:`~alignment_core.models.sequence`.
    """
    if _seen is not None:
        options = {name for name, value in more.items() if value is not None}
        plain = attention_mask is None and not dropout and options <= HARMLESS_OPTIONS
        causal = more.get("is_causal") is not False and getattr(module, "is_causal", True)
        plain = plain and causal and query.shape[-1] == value.shape[-1]
        _seen.append((query.shape[1], key.shape[1], query.shape[-1]) if plain else None)
    if nodes is None:
        if _in_use:
            raise RuntimeError("the model does not pass the nodes of its prefix trees to its attention")
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if sequence_group is not None:
        query, key, value = sequence_group.by_heads(query, key, value)
        output, _ = _attend(module, query, key, value, attention_mask, dropout, scaling, nodes)
        return sequence_group.by_tokens(output), None
    if query.device.type == "cpu":
        return TreeAttention.apply(query, key, value, nodes, scaling).transpose(1, 2).contiguous(), None
    if _probing:
        visible = flex_trees.visible(nodes, query.device)
        return sdpa_attention_forward(module, query, key, value, visible, dropout, scaling, **more)
    return flex_trees.attend(module, query, key, value, nodes, scaling), None


def _mask(*arguments: Any, mask_function: Any = causal_mask_function, **options: Any) -> Any:
    """The mask that ``transformers`` uses, None over trees; in a probe, one if a token does not see all tokens before it."""
    if not _in_use:
        return sdpa_mask(*arguments, mask_function=mask_function, **options)
    if _seen is None or mask_function is causal_mask_function:
        return None
    return torch.ones(())


transformers.AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def over_trees(probing: bool = False) -> Iterator[None]:
    """The context of a forward pass with ``nodes``."""
    global _in_use, _probing
    before = _in_use, _probing
    _in_use = True
    _probing = probing
    try:
        yield
    finally:
        _in_use, _probing = before


def use_trees(
    model: Any, head: Head, device: str, dtype: torch.dtype, dropout: bool, ranks: int = 1, layers_shared_by: int = 1
) -> bool:
    """Let a ``transformers`` model of this head attend over prefix trees if it supports that; whether it does.

    It does if all its layers use plain causal attention, if it then computes the same as for each sequence alone (probed on the
    model's present device, in its present type), and if ``device`` supports it in ``dtype``, where it will compute. Otherwise
    the model is unchanged. With ``dropout`` it will train with the dropout of its configuration, which must not be in its
    attention. With several ``ranks`` of a sequence group each computes a part of the heads; raises UserError if they cannot
    share them evenly. So does each of the ranks by which its layers will be shared.
    """
    if model.config._attn_implementation == NAME:
        return True
    if model.config._attn_implementation != "sdpa":  # soft caps, sinks
        _warn_once(model.config.model_type)
        return False
    model.config._attn_implementation = NAME
    heads: frozenset[Heads] = frozenset()
    try:
        heads = _cached(_heads_if_plain, model, head, dropout)
        can = bool(heads) and _cached(_are_as_alone, model, head, True)
    except Exception as error:  # custom models may not accept these arguments
        if out_of_memory(error):
            raise
        logger.debug("no prefix trees", exc_info=error)
        can = False
    finally:
        model.config._attn_implementation = "sdpa"
    if can and ranks > 1:
        heads = frozenset(_of_one_rank(*shape, ranks) for shape in heads)
    heads = frozenset((count // layers_shared_by, keys // layers_shared_by, size) for count, keys, size in heads)
    if not can:
        _warn_once(model.config.model_type)
    elif device != "cpu":
        can = all(flex_trees.works(device, dtype, *shape) for shape in heads)
    if can:
        model.config._attn_implementation = NAME
    return can


def _of_one_rank(heads: int, keys: int, size: int, ranks: int) -> Heads:
    """What each of several ranks computes of an attention."""
    if heads % ranks:
        raise UserError(
            f"{FIELD}: {ranks} ranks cannot share {heads} attention heads evenly; set it to a divisor of {heads}"
        )
    return heads // ranks, keys * key_repeats(heads, keys, ranks) // ranks, size


@functools.cache
def _warn_once(model_type: str) -> None:
    logger.warning(
        "a %s model keeps the attention of transformers, without shared prefixes: not all of its layers are plain causal "
        "attention",
        model_type,
    )


def keeps_apart(model: Any, head: Head) -> bool:
    """Whether sequences in one line do not influence each other.

    Layers that carry a state from token to token, as in state-space models, do not know where a sequence ends, and neither do
    masks that ``transformers`` makes without position ids, as for gpt-oss.
    """
    return bool(_cached(_are_as_alone, model, head, False))


def _cached(probe: Callable[[Any, Head, bool, int], Any], model: Any, head: Head, setting: bool) -> Any:
    """The result of a probe of the model, which computes its first layers, up to one of each kind. Probe results are cached per
    architecture, because weights do not affect them and a probe takes longer than loading the weights.

    An undecided probe (None) counts as True this time.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    kind = (probe, setting, type(model), head, model.dtype, str(config))
    if kind not in _probed:
        try:
            with first_layers(model) as count:
                result = probe(model, head, setting, count)
        except IndexError:  # the forward pass of a custom model counts its layers by its configuration
            result = probe(model, head, setting, model.config.get_text_config().num_hidden_layers)
        if result is None:
            return True
        _probed[kind] = result
    return _probed[kind]


_probed: dict[tuple[Any, ...], Any] = {}


def _sequences(model: Any) -> list[np.ndarray]:
    """Three sequences with a common prefix, in their order in a prefix tree."""
    config = model.config.get_text_config()
    length = min(24, getattr(config, "max_position_embeddings", None) or 24)
    return [np.array([*range(length - 4), *[after] * 4]) % config.vocab_size for after in (1, 2, 3)]


def _heads_if_plain(model: Any, head: Head, mode: bool, layers: int) -> frozenset[Heads]:
    """The heads of its ``layers``, in training or evaluation mode, if each calls :func:`_attend` for plain causal attention;
    otherwise none."""
    global _seen
    training = model.training
    _seen = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _states(model.train(mode), head, _sequences(model)[-1:], share_prefixes=True)
        plain = None not in _seen and len(_seen) == layers
        return frozenset(heads for heads in _seen if heads is not None) if plain else frozenset()
    finally:
        _seen = None
        model.train(training)


def _are_as_alone(model: Any, head: Head, share_prefixes: bool, _layers: int) -> bool | None:
    """Whether sequences that are computed together do not influence each other, and the last one's states are those of it
    alone; None if the weights are not finite, so that the probe cannot decide."""
    sequences = _sequences(model)
    with torch.no_grad():
        alone = _states(model, head, sequences[-1:], share_prefixes=False)
        if not alone.isfinite().all():
            return None
        as_alone = _close(_states(model, head, sequences, share_prefixes), alone)
    return as_alone and _are_kept_apart(model, head, share_prefixes)


def _are_kept_apart(model: Any, head: Head, share_prefixes: bool) -> bool:
    """Whether a sequence has no influence on the next one, at any precision: neither by its gradient, which is exactly zero
    then, nor by choices that have no gradient."""
    first, second, last = _sequences(model)
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output if output.requires_grad else output.requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            states = _states(model, head, [first, last], share_prefixes)
            (gradient,) = torch.autograd.grad(states.float().square().sum(), embedded[:1])
    finally:
        hook.remove()
    layout = lay_out([first, last])
    foreign = np.setdiff1d(layout.places[0], layout.places[1]) if share_prefixes else np.arange(len(first))
    with torch.no_grad():
        changed = _states(model, head, [second, last], share_prefixes)
    return not gradient[0, foreign].any() and _close(changed, states.detach())


def _states(model: Any, head: Head, sequences: Sequence[np.ndarray], share_prefixes: bool) -> Tensor:
    """Output of the last layer for the tokens of the last sequence. [T, H], or [T, V] logits"""
    if share_prefixes:
        layout = lay_out(sequences)
        ids, positions, places, more = layout.ids, layout.positions, layout.places[-1], {"nodes": layout.nodes}
    else:
        ids, positions = np.concatenate(sequences), np.concatenate([np.arange(len(ids)) for ids in sequences])
        places, more = np.arange(len(ids) - len(sequences[-1]), len(ids)), {}
    with over_trees(probing=True) if share_prefixes else nullcontext():
        output = (model if head == "lm" else model.base_model)(
            input_ids=torch.from_numpy(ids)[None].to(model.device),
            position_ids=of_axes(model, torch.from_numpy(positions)[None].to(model.device)),
            use_cache=False,
            **more,
        )
    states: Tensor = (output.logits if head == "lm" else output.last_hidden_state)[0, places]
    return states


def _close(result: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree in half of the digits of their type."""
    difference = (result.float() - expected.float()).norm()
    return bool(difference <= torch.finfo(result.dtype).eps ** 0.5 * expected.float().norm())
