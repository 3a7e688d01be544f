"""Log-probabilities from hidden states, without the logits of more than a few places at a time.

The logits of K places over V tokens are K · V numbers, 1.2 GB in fp32 for 2,048 places of 152,000 tokens, and their softmax and
its gradient are as large. Here they are computed for ``PLACES`` places, reduced to what is asked of each place, and dropped;
the backward pass computes them again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

log = logging.getLogger(__name__)
PLACES = 256
"""Places whose logits are in memory at a time."""
SUMMED = 2048
"""Places whose gradients by logits in half precision are kept, so that one product sums them in fp32 for the gradient of the
weights: each further product rounds it again. After 8,192 places its error is 0.3 % (0.6 % with products of 256, 0.19 % of a
single one). They take 0.6 GB for 152,000 tokens; a sum in fp32 would take 2.5 GB with 4,096 hidden units."""
Reduce = Callable[[Tensor, slice], Tensor]
"""Logits [k, V] in fp32 of the places in a slice of all K places → what is asked of each, [k, ...]."""


class VocabularyHead:
    """The last layer of a language model and what the model does with its output, such as a scale or a soft cap."""

    def __init__(self, model: Any) -> None:
        self.layer = model.get_output_embeddings()
        self.after = _after_layer(model, self.layer)
        """[k, V] outputs of the layer → logits [k, V]; None if that depends on other places, or cannot be told: then the logits
        are those of the model's own forward pass, of all places at once."""
        self.tokens: int | None = None
        """If set, only so many first tokens of the vocabulary have a probability."""
        self.of_sum = False
        """Whether the loss is the sum of the results, times a number: the forward pass then computes the gradient beside them,
        and no logits are computed twice. The backward pass raises RuntimeError where the loss is another function of them."""
        self._outputs = self.layer.forward
        self.layer.forward = self._forward  # a call of the layer is what lets ZeRO 3 gather its weights

    def __call__(self, states_KH: Tensor, reduce: Reduce) -> Tensor:
        """What ``reduce`` gives of the logits of hidden states; has a gradient. [K, H] → [K, ...]"""
        result: Tensor = self.layer(states_KH, reduce)
        return result

    def of_logits(self, logits_KV: Tensor, reduce: Reduce) -> Tensor:
        """The same of logits of the model's forward pass."""
        return reduce(logits_KV.float()[:, : self.tokens], slice(None))

    def _forward(self, states: Tensor, reduce: Reduce | None = None) -> Tensor:
        if reduce is None:
            outputs: Tensor = self._outputs(states)
            return outputs

        after, of_logits = self.after, reduce
        assert after is not None

        def reduced(outputs_kV: Tensor, places: slice) -> Tensor:
            return of_logits(after(outputs_kV).float()[:, : self.tokens], places)

        if type(self.layer) is nn.Linear:
            of_sum = self.of_sum and torch.is_grad_enabled()
            return _OfLinear.apply(states, self.layer.weight, self.layer.bias, reduced, of_sum)

        def of(part_kH: Tensor, places: slice) -> Tensor:
            return reduced(self._outputs(part_kH), places)

        parts = [(states[places], places) for places in _slices(len(states), PLACES)]
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(of, *part, use_reentrant=False) for part in parts])
        return torch.cat([of(*part) for part in parts])


class _OfLinear(torch.autograd.Function):
    """For a linear layer: the gradient of its weights adds up in place. Autograd would make one of their size for each part."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, reduced: Reduce, of_sum: bool) -> Tensor:
        ctx.save_for_backward(states, weight, bias)
        ctx.reduced = reduced
        if not of_sum:
            linear = nn.functional.linear
            return torch.cat(
                [reduced(linear(states[part], weight, bias), part) for part in _slices(len(states), PLACES)]
            )
        result, ctx.of_sum = _with_gradients(ctx, states, weight, bias, reduced, None)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        states, weight, bias = ctx.saved_tensors
        if hasattr(ctx, "of_sum"):
            scale = grad.flatten()[:1].sum()
            # Without a read of the device's memory, for which all of its work would have to end.
            torch._assert_async(
                (grad == scale).all(), "the loss was declared to be a sum of log-probabilities, and is not"
            )
            return *(tensor if tensor is None else tensor.mul_(scale) for tensor in ctx.of_sum), None, None
        _, gradients = _with_gradients(ctx, states, weight, bias, ctx.reduced, grad)
        return *gradients, None, None


def _with_gradients(
    ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, reduced: Reduce, grad_K: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """[K, ...] and the gradients of states, weights and bias by that of the result, None for that of its sum."""
    wanted: tuple[Tensor | None, ...] = (states, weight, bias)
    of_states, of_weight, of_bias = gradients = [
        torch.zeros_like(tensor) if tensor is not None and ctx.needs_input_grad[number] else None
        for number, tensor in enumerate(wanted)
    ]
    results = []
    is_rounded = of_weight is not None and weight.itemsize < 4
    kept_tV = weight.new_empty(min(SUMMED, len(states)), len(weight)) if is_rounded else None
    for together in _slices(len(states), SUMMED if is_rounded else PLACES):
        count = together.stop - together.start
        for part in _slices(count, PLACES):
            places = slice(together.start + part.start, together.start + part.stop)
            outputs = nn.functional.linear(states[places], weight, bias).requires_grad_()
            with torch.enable_grad():
                result = reduced(outputs, places)
            by_result = torch.ones_like(result) if grad_K is None else grad_K[places]
            (grad_tV,) = torch.autograd.grad(result, outputs, by_result)
            if kept_tV is not None:
                kept_tV[part] = grad_tV
            results.append(result.detach())
        if kept_tV is not None:
            grad_tV = kept_tV[:count]
        if of_states is not None:
            torch.mm(grad_tV, weight, out=of_states[together])
        if of_weight is not None:
            of_weight.addmm_(grad_tV.T, states[together])
        if of_bias is not None:
            of_bias += grad_tV.sum(0)
    return torch.cat(results), gradients


def _slices(count: int, size: int) -> list[slice]:
    """At least one, so that no places give a result of no rows."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


class _Stand:
    """In the place of a module: a call gives ``output``; its modules are this stand-in, other attributes the module's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.output: Any = None

    def __call__(self, *_arguments: Any, **_options: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self if isinstance(value, nn.Module) else value


class _Outputs(BaseModelOutputWithPast):
    """Of a model without its head; what it lacks is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _after_layer(model: Any, layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """See :class:`VocabularyHead`: the forward pass of ``transformers`` with stand-ins for the layer and all before it."""
    shell = copy.copy(model)
    shell._modules = {**model._modules}
    stands: dict[str, _Stand] = {}
    for wanted in (layer, model.base_model):
        for name, child in model._modules.items():
            if child is wanted:
                stands[name] = shell._modules[name] = _Stand(child)
    if len(stands) != 2:
        return None
    of_layer, of_rest = stands.values()

    def after(outputs_kV: Tensor) -> Tensor:
        ids = torch.zeros(1, len(outputs_kV), dtype=torch.long, device=outputs_kV.device)
        states = outputs_kV.new_zeros(1, len(outputs_kV), model.config.get_text_config().hidden_size)
        of_layer.output, of_rest.output = outputs_kV[None], _Outputs(last_hidden_state=states)
        try:
            logits: Tensor = shell.forward(input_ids=ids, use_cache=False).logits[0]
        finally:
            of_layer.output = of_rest.output = None
        return logits

    width: int = getattr(layer, "out_features", None) or model.config.get_text_config().vocab_size
    sample = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).mul(30).to(model.device, model.dtype)
    try:
        with torch.no_grad():
            logits, alone = after(sample), after(sample[1:2])
    except Exception as error:  # custom models may compute logits in any way
        log.debug("logits of all places at once", exc_info=error)
        return None
    if logits.shape[0] != len(sample) or not torch.equal(logits[1:2], alone):
        return None
    return (lambda outputs_kV: outputs_kV) if torch.equal(logits.float(), sample.float()) else after
