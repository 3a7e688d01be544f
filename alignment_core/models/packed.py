"""A model that computes packed micro-batches: lines of tokens in; log-probabilities, scores or values out."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from alignment_core.errors import UserError
from alignment_core.losses.logprobs import candidate_logps, entropy, token_logps, top_logps
from alignment_core.models.attention import keeps_apart, over_trees, use_trees
from alignment_core.models.flash_attention import bounds, use_flash_attention
from alignment_core.models.image_text import ImageInputs, has_axes, of_axes, reads_images
from alignment_core.models.rope import RopeLengths, sequence_lengths
from alignment_core.models.sequence import FIELD, SequenceGroup, Slice
from alignment_core.models.vocabulary_head import VocabularyHead

if TYPE_CHECKING:
    from alignment_core.models.images import ImageProcessor
    from alignment_core.models.loading import Head
    from alignment_core.models.microbatch import MicroBatch
    from alignment_core.models.prefix_tree import TreeNode

log = logging.getLogger(__name__)


class PackedModel(nn.Module):
    """Wraps a ``transformers`` model of either head; its forward gives [K] log-probabilities, [S] scores or [K] values; of
    micro-batches with candidates, the log-probabilities [K, 1 + C] of targets and candidates.

    There is no attention mask. The attention of :mod:`~alignment_core.models.attention` separates sequences that share their
    prefixes; ``transformers`` separates those in lines, by position ids that restart. Only places that predict a target reach
    the vocabulary projection.
    """

    def __init__(
        self,
        model: Any,
        head: Head,
        with_entropy: bool = False,
        share_prefixes: bool = True,
        device: str = "cpu",
        dropout: bool = False,
        context: int | None = None,
        dtype: torch.dtype | None = None,
        flash: bool = False,
        sequence_group: SequenceGroup | None = None,
        load_processor: Callable[[], ImageProcessor | None] = lambda: None,
        has_images: bool = True,
        blank_images: bool = False,
        layers_shared_by: int = 1,
    ) -> None:
        """``with_entropy``, of a language model: the forward gives [2, K], log-probabilities and entropies in nats.

        With ``share_prefixes`` sequences share their prefixes if the model supports that on the ``device`` that will compute
        it, in ``dtype`` (by default the model's present one). A model that does not support several sequences in a line gets
        each in a line of its own. With ``dropout`` the model's own dropout is on in training mode; that of LoRA adapters always
        is. ``context``: see :class:`~alignment_core.models.rope.RopeLengths`. ``flash``: compute attention without shared
        prefixes by :mod:`~alignment_core.models.flash_attention`.

        The ranks of a ``sequence_group`` call it at once, on the same micro-batch, and get the same output. Raises UserError
        for a model that they cannot compute together. ``layers_shared_by`` is the number of ranks that will hold a part of each
        linear layer, and so of the heads; :func:`~alignment_core.models.tensor_parallel.split` gives them these parts later.

        An image-text model shares no prefixes if its rows ``has_images``, and computes them with the processor that
        ``load_processor`` gives; with ``blank_images`` also a blank image for a micro-batch without any, so that every rank
        issues the same collectives for its vision tower, in the same order.
        """
        super().__init__()
        self.model = model
        self.head = head
        self.with_entropy = with_entropy
        self.top: int | None = None
        """Of a language model: the forward returns this many of the likeliest tokens of each place instead, [2, K, C]."""
        self.dropout = dropout
        if not dropout:
            for layer in _checkpointed_layers(model):
                layer.register_forward_pre_hook(self._set_evaluation)
                layer.register_forward_hook(self._restore_mode, always_call=True)
        self.rope = RopeLengths(model, context)
        # Shared tokens are computed once, so their rotary frequencies must be the same in all of their sequences.
        one_length = not self.rope.needed or context is not None
        self.sequence_group = sequence_group or SequenceGroup()
        ranks = self.sequence_group.size
        with_images = has_images and reads_images(model)
        self.images = ImageInputs(model, load_processor) if with_images else None
        self.blank_images = blank_images and self.images is not None
        self.shares_prefixes = (
            share_prefixes
            and one_length
            and not with_images
            and use_trees(model, head, device, dtype or model.dtype, dropout, ranks, layers_shared_by)
        )
        """Whether its micro-batches must be laid out with shared prefixes."""
        if ranks > 1 and not self.shares_prefixes:
            raise UserError(
                f"{FIELD}: several ranks cannot compute a sequence of a {model.config.model_type} model together, because "
                f"{_why_not_together(share_prefixes, one_length, with_images)}; set it to 1"
            )
        # Chunked attention counts its chunks from the start of the line, not of the sequence.
        counts_chunks = getattr(model.config.get_text_config(), "attention_chunk_size", None)
        self.one_sequence_per_line = not self.shares_prefixes and (bool(counts_chunks) or not keeps_apart(model, head))
        """Whether each sequence needs a line of its own."""
        if self.one_sequence_per_line:
            log.info(
                "a %s model does not keep sequences in one line apart: they are not packed", model.config.model_type
            )
        if flash and not self.shares_prefixes:
            use_flash_attention(model)
        self.in_one_line = flash and not self.shares_prefixes and not self.one_sequence_per_line
        """Whether all sequences of a micro-batch are computed in one line: the flash kernel takes lines as sequences."""
        self.router_loss: Tensor | None = None
        """The load-balancing loss of the last forward pass in training, after :meth:`balance_routers`; has a gradient."""
        self.noise: Tensor | None = None
        """Noise that the next forward pass adds to the embeddings of its micro-batch, [L, W, H]; after :meth:`accept_noise`."""
        self._balancing: Any = None
        self._selected: Tensor | None = None
        self._states: Tensor | None = None
        if head == "lm":
            self.vocabulary = VocabularyHead(model)
            if ranks > 1 and self.vocabulary.after is None:
                raise UserError(
                    f"{FIELD}: the logits of a {model.config.model_type} model may depend on those of other tokens, which are "
                    "on other ranks; set it to 1"
                )
            self.vocabulary.layer.register_forward_pre_hook(self._select_places)
        elif isinstance(model.score, nn.Linear):
            score: Any = model.score
            score.forward = functools.partial(_linear_in_fp32, score)

    def train(self, mode: bool = True) -> PackedModel:
        """Set training or evaluation mode. Without ``dropout``, training mode is for LoRA adapters and for gradient
        checkpointing; all other modules compute as in evaluation, so that the policy that trains equals the one that samples
        and the reference. (GPT-2 and OPT have dropout of 0.1 in their configuration, Mixtral
        and PhiMoE can have noise before their routers.)"""
        super().train(mode)
        if mode and not self.dropout:
            for name, module in self.model.named_modules():
                module.training = "lora_" in name
            for layer in _checkpointed_layers(self.model):
                layer.training = True  # except in their forward pass: they checkpoint in training mode only
        return self

    def _set_evaluation(self, layer: nn.Module, *_: Any) -> None:
        layer.training = False

    def _restore_mode(self, layer: nn.Module, *_: Any) -> None:
        layer.training = self.training

    @property
    def router_aux_loss_coef(self) -> float:
        """The coefficient of the load-balancing loss in the model's configuration; 0 without routers, or without a language
        model's head."""
        coefficient = getattr(self.model.config.get_text_config(), "router_aux_loss_coef", None)
        return float(coefficient or 0.0) if self.head == "lm" and self._load_balancing_loss else 0.0

    @property
    def _load_balancing_loss(self) -> Any:
        """The function of ``transformers`` for the model; None if it has no routers, or if the function takes other arguments,
        as Doge's does."""
        if not hasattr(self.model.config.get_text_config(), "router_aux_loss_coef") or not _has_routers(self.model):
            return None
        function = getattr(sys.modules[type(self.model).__module__], "load_balancing_loss_func", None)
        parameters = inspect.signature(function).parameters if function else ()
        return function if [*parameters] == ["gate_logits", "num_experts", "top_k", "attention_mask"] else None

    def balance_routers(self) -> None:
        """Let forward passes in training set ``router_loss``, the load-balancing loss of ``transformers``.

        It covers all routers of a mixture of experts and the tokens of one pack, without padding of lines. Raises UserError if
        the model has no routers.
        """
        self._balancing = self._load_balancing_loss
        if self._balancing is None:
            raise UserError(
                f"training.router_aux_loss_coef: a {self.model.config.model_type} model has no routers whose load could be "
                "balanced; leave it at 0"
            )

    def accept_noise(self) -> None:
        """Let forward passes add ``noise`` to the embeddings."""
        self.model.get_input_embeddings().register_forward_hook(self._add_noise)

    def _add_noise(self, _module: nn.Module, _arguments: Any, embeddings: Tensor) -> Tensor | None:
        return None if self.noise is None else embeddings + self.noise.to(embeddings.dtype)

    def _select_places(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """[L, W, H] hidden states → [1, K, H], those of the selected places; none if their logits are computed later."""
        if self._selected is None:
            return None
        states_KH = arguments[0].flatten(0, 1)[self._selected]
        if self.vocabulary.after is None:
            return (states_KH[None],)
        self._states = states_KH
        return (states_KH.detach()[None, :0],)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        multiplicity: Tensor,
        predict_K: Tensor,
        labels_K: Tensor,
        last_S: Tensor,
        temperature: float = 1.0,
        nodes: tuple[TreeNode, ...] | None = None,
        candidates_KC: Tensor | None = None,
        images: tuple[str, ...] = (),
    ) -> Tensor:
        assert (nodes is not None) == self.shares_prefixes, "the micro-batch was laid out for another model"
        one_sequence_per_line = self.one_sequence_per_line or (
            bool(images) and self.images is not None and self.images.one_sequence_per_line
        )
        in_one_line = self.in_one_line and not one_sequence_per_line
        if in_one_line:
            input_ids, position_ids, multiplicity = (
                tensor.view(1, -1) for tensor in (input_ids, position_ids, multiplicity)
            )
            if self.noise is not None:
                self.noise = self.noise.view(1, -1, self.noise.shape[-1])
        if self.rope.needed:
            self.rope.lengths = self._lengths(position_ids)
        if one_sequence_per_line:
            used_N = multiplicity.flatten() > 0
            input_ids, position_ids, multiplicity, place_N = _apart(input_ids, position_ids, multiplicity)
            if self.noise is not None:
                noise_NH = self.noise.new_zeros(input_ids.numel(), self.noise.shape[-1])
                noise_NH[place_N[used_N]] = self.noise.flatten(0, 1)[used_N]
                self.noise = noise_NH.view(*input_ids.shape, -1)
            predict_K, last_S = place_N[predict_K], place_N[last_S]
            if self.rope.needed:
                self.rope.lengths = torch.where(
                    multiplicity > 0, multiplicity.sum(1, keepdim=True), multiplicity.shape[1]
                )
        places_K = last_S if self.head == "score" else predict_K  # a value is that of the state before each token
        here_k = places_k = places_K
        nodes_of_line = nodes
        part: Slice | None = None
        if self.sequence_group.size > 1:
            assert nodes is not None
            part = Slice(self.sequence_group, input_ids.shape[1])
            nodes_of_line = part.padded(nodes)
            input_ids, position_ids = part.of(input_ids), part.of(position_ids)
            if self.rope.lengths is not None:
                self.rope.lengths = part.of(self.rope.lengths)
            if self.noise is not None:
                self.noise = part.of(self.noise)
            here_k, places_k = part.here(places_K)
            if self.head == "lm":
                labels_K = labels_K[here_k]
                candidates_KC = None if candidates_KC is None else candidates_KC[here_k]
        options: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if in_one_line:
            options |= bounds(position_ids)
        options |= self._image_options(input_ids, position_ids, multiplicity, images)
        if nodes is not None:
            options["nodes"] = nodes_of_line
        if part is not None:
            options["sequence_group"] = self.sequence_group
        balancing = self._balancing is not None and self.training
        if balancing:
            options["output_router_logits"] = True
        self._selected = places_k if self.head == "lm" else None
        try:
            with over_trees() if self.shares_prefixes else nullcontext(), self._blank_image(images):
                output = (self.model if self.head == "lm" else self.model.base_model)(**options)
        finally:
            self._selected = None
        if balancing:
            config = self.model.config.get_text_config()
            experts = getattr(config, "num_experts", None) or config.num_local_experts  # either name, by the model
            logits = output.router_logits
            if part is not None:
                logits = tuple(part.whole(of_layer.flatten(0, -2)) for of_layer in logits)
            self.router_loss = self._balancing(logits, experts, config.num_experts_per_tok, multiplicity)
        if self.head == "lm":
            result = self._reduced(output.logits[0], labels_K, temperature, candidates_KC)
        else:
            result = self.model.score(output.last_hidden_state.flatten(0, 1)[places_k])[:, 0]
        if part is not None:
            result = part.gathered(result, here_k, len(places_K))
        return result.movedim(1, 0) if self.head == "lm" and self._has_pair(candidates_KC) else result

    def _blank_image(self, images: tuple[str, ...]) -> AbstractContextManager[None]:
        """The context of a forward pass: with a blank image if it needs one."""
        return self.images.with_blank_image() if self.images and self.blank_images and not images else nullcontext()

    def _image_options(
        self, input_ids: Tensor, position_ids: Tensor, multiplicity: Tensor, images: tuple[str, ...]
    ) -> dict[str, Any]:
        """Images and positions over lines [L, W], as options of the model's forward pass."""
        if not images:
            return {"position_ids": of_axes(self.model, position_ids)}
        assert self.images is not None, "rows with images need an image-text model, made with `has_images`"
        options = self.images.options(images, input_ids)
        if not has_axes(self.model):
            return options
        ids_ST, _, used_ST, place_N = _apart(input_ids, position_ids, multiplicity)
        axes_3LW = self.images.axes(options, ids_ST, used_ST).flatten(1)[:, place_N].view(-1, *position_ids.shape)
        return {**options, "position_ids": torch.cat([position_ids[None], axes_3LW])}

    def _has_pair(self, candidates_KC: Tensor | None) -> bool:
        """Whether a language model gives two numbers for each place or token."""
        return self.top is not None or (self.with_entropy and candidates_KC is None)

    def _reduced(self, logits_KV: Tensor, labels_K: Tensor, temperature: float, candidates_KC: Tensor | None) -> Tensor:
        """What the forward pass gives of a language model, by place; its ``logits_KV`` have no rows if their states were
        kept."""

        def reduce(logits_kV: Tensor, places: slice) -> Tensor:
            if temperature != 1:
                logits_kV = logits_kV / temperature  # they are in fp32: bf16 would round the quotient
            if self.top is not None:
                return top_logps(logits_kV, self.top).movedim(0, 1)
            if candidates_KC is not None:
                return candidate_logps(logits_kV, labels_K[places], candidates_KC[places])
            logps_k = token_logps(logits_kV, labels_K[places])
            return torch.stack([logps_k, entropy(logits_kV)], -1) if self.with_entropy else logps_k

        states_KH, self._states = self._states, None
        of_logits = self.vocabulary.of_logits
        return of_logits(logits_KV, reduce) if states_KH is None else self.vocabulary(states_KH, reduce)

    def _lengths(self, position_ids: Tensor) -> Tensor:
        """Length of the sequence of each token. [L, W]"""
        if not self.shares_prefixes:
            return sequence_lengths(position_ids)
        assert self.rope.context is not None, "without a context such a model shares no prefixes"
        longest = int(position_ids.max()) + 1
        if longest > self.rope.context:
            raise UserError(
                f"a sequence of {longest} tokens is longer than any that is sampled ({self.rope.context}), and this model has "
                "other rotary positions for longer sequences: set max_length of its rows, or resources.attention to `sdpa`"
            )
        return torch.ones_like(position_ids)


def _why_not_together(share_prefixes: bool, one_length: bool, with_images: bool) -> str:
    """Why a model's sequences are not laid out as prefix trees."""
    if with_images:
        return "it also reads images, which some rows have"
    if not share_prefixes:
        return "resources.attention is `sdpa`"
    if not one_length:
        return "its rotary positions depend on the length of each sequence"
    return "not all of its layers are plain causal attention, or the device does not compute that (see the log)"


def _has_routers(model: nn.Module) -> bool:
    """Whether a module computes the ``router_logits`` that ``transformers`` records. Families of mixtures of experts have dense
    models, too, such as Granite 4 with no local experts."""
    recorded = getattr(model, "_can_record_outputs", None) or {}
    recorders: Any = recorded.get("router_logits", ())
    recorders = recorders if isinstance(recorders, list | tuple) else (recorders,)
    return any(
        isinstance(module, getattr(recorder, "target_class", recorder))
        and f".{getattr(recorder, 'layer_name', None) or name}." in f".{name}."
        for recorder in recorders
        for name, module in model.named_modules()
    )


def _linear_in_fp32(layer: nn.Linear, states: Tensor) -> Tensor:
    """The output of a head in fp32 for weights of any type: in bf16, scores near 8 are multiples of 1/16, and the completions
    of a prompt would tie."""
    return nn.functional.linear(
        states.float(), layer.weight.float(), None if layer.bias is None else layer.bias.float()
    )


def _checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose activations gradient checkpointing recomputes."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _apart(input_ids: Tensor, position_ids: Tensor, multiplicity: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lines of several sequences [L, W] as lines of one each [S, T], right-padded (attention is causal): ids, positions and
    multiplicity; and for each of the L·W places its new place, 0 for padding."""
    is_used_N = multiplicity.flatten() > 0
    position_N = position_ids.flatten()
    sequence_N = (is_used_N & (position_N == 0)).cumsum(0) - 1
    count, width = int(sequence_N[-1]) + 1, int(position_N[is_used_N].max()) + 1
    place_N = torch.where(is_used_N, sequence_N * width + position_N, 0)
    ids = input_ids.new_zeros(count * width)
    used = multiplicity.new_zeros(count * width)
    ids[place_N[is_used_N]] = input_ids.flatten()[is_used_N]
    used[place_N[is_used_N]] = 1
    positions = torch.arange(width, device=ids.device).expand(count, width)
    return ids.view(count, width), positions, used.view(count, width), place_N


def run_packed(module: Callable[..., Tensor], batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """Call ``module`` (a :class:`PackedModel`, bare or within a DeepSpeed engine) on a micro-batch.

    ``temperature`` is that of the returned distribution over tokens.
    """
    places = (batch.multiplicity, batch.predict_K, batch.labels_K, batch.last_S)
    more = (temperature, batch.nodes, batch.candidates_KC, batch.images)
    return module(batch.input_ids, batch.position_ids, *places, *more)
