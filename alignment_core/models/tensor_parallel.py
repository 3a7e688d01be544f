"""Tensor parallelism: the ranks of a group hold a part of each linear layer, and compute each token together (Shoeybi et al.
2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism").

The first layers of attention and of an MLP are split by their outputs, so that a rank has some of the heads, and some of the
hidden units; the last ones by their inputs, and the outputs of all ranks are added up. Between them no rank needs numbers of
another one. Which layers are which is the ``base_model_tp_plan`` of ``transformers``. Everything else, such as norms,
embeddings and heads, is whole on every rank, which computes the same with it.

DeepSpeed's own AutoTP (0.19.8) is not used: its process groups belong to the process, so a later model in it gets those of the
first one, whatever its size; frozen models would need an engine; and it splits a model that is on the device already.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import linear

from alignment_core.errors import UserError
from alignment_core.models.rank_groups import RankGroup, check_divides, neighbours, peers
from alignment_core.models.tensor_shapes import FIELD, why_not_split


@dataclass(frozen=True, eq=False)
class TensorGroup(RankGroup):
    """The ranks that hold the parts of one model; by default this rank alone."""

    peers: Any = None
    """Process group of the ranks that hold the same parts as this one; None: all ranks."""

    # Megatron's interface, by which DeepSpeed asks for groups. Its name for the ranks of one model is "model parallel".

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_group(self) -> Any:
        return self.processes

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.peers)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.peers)

    def get_data_parallel_group(self) -> Any:
        return self.peers


def tensor_group(size: int, seconds: float) -> TensorGroup:
    """This rank's group of ``size`` neighbouring ranks, whose collectives have so many ``seconds``. Collective over all ranks.

    Raises UserError if the ranks are no multiple of it.
    """
    if size == 1:
        return TensorGroup()
    check_divides(size, FIELD)
    return TensorGroup(size, dist.get_rank() % size, neighbours(size, seconds), peers(size, seconds))


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a parameter: one of equal slices along a dimension."""

    group: TensorGroup
    dim: int

    def of(self, whole: Tensor) -> Tensor:
        """This rank's slice, a view."""
        return whole.chunk(self.group.size, self.dim)[self.group.rank]

    def whole(self, part: Tensor) -> Tensor:
        """The slices of all ranks of the group together. Collective over it."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.group.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group.processes)
        return torch.cat(parts, self.dim)


def part_of(parameter: Tensor) -> Part | None:
    """Which part of a parameter this rank has; None if it is whole."""
    part: Part | None = getattr(parameter, "tensor_part", None)
    return part


def own(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of the shape of the whole parameter."""
    part = part_of(parameter)
    return whole if part is None else part.of(whole)


def gathered(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The whole of a tensor of the shape of a parameter on this rank, such as its data, in memory of its own if the parameter
    is in parts. Collective over the group."""
    part = part_of(parameter)
    return tensor if part is None else part.whole(tensor)


def ranks_of(parameter: Tensor) -> int:
    """Number of ranks that share a parameter."""
    part = part_of(parameter)
    return 1 if part is None else part.group.size


def gathered_state(module: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Whole parameters and buffers by name, those that are in parts in CPU memory, one gathered after the other. Collective;
    empty on ranks that do not ``keep`` them."""
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        whole = gathered(tensor, tensor.detach())
        if keep:
            state[name] = whole if part_of(tensor) is None else whole.cpu()
    return state


def gradient_norm(parameters: Iterable[Tensor], group: TensorGroup) -> Tensor:
    """The norm of the gradient by the whole model, of which each rank has its parts and all that is not split."""
    gradients: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[part_of(parameter) is not None].append(parameter.grad)
    whole: Tensor = torch.nn.utils.get_total_norm(gradients[False])
    if group.size == 1:
        return whole
    square = torch.nn.utils.get_total_norm(gradients[True]).square()
    dist.all_reduce(square, group=group.processes)
    return (square + whole.square()).sqrt()


def split(model: Any, group: TensorGroup) -> None:
    """Leave this rank its part of the linear layers of a ``transformers`` model, which then compute with those of the group.

    All ranks have the same model before. Raises UserError for a model that cannot be split.
    """
    if problem := why_not_split(model.config.to_dict(), group.size):
        raise UserError(f"{FIELD}: {problem}; set it to 1")
    modules = dict(model.base_model.named_modules())
    layers = [name for name, module in modules.items() if not isinstance(module, nn.Embedding)]  # these stay whole
    styles = {name: style for name in layers if (style := _style(model.config, name)) is not None}
    _check_complete(model, styles)
    for name, style in styles.items():
        if style != _OF_EACH_HEAD and type(modules[name]) is not nn.Linear:
            raise UserError(f"{FIELD}: {name} is a {type(modules[name]).__name__}, which is not split; set it to 1")
    for name, style in styles.items():
        _SPLITS[style](modules[name], group)
    for parent in {name.rpartition(".")[0] for name, style in styles.items() if style == _BY_OUTPUTS}:
        modules[parent].register_forward_pre_hook(functools.partial(_sum_gradients, group), with_kwargs=True)


def _style(config: Any, name: str) -> str | None:
    """How a module is split, by the plan of ``transformers``."""
    plan: dict[str, str] = config.base_model_tp_plan or {}
    return plan.get(re.sub(r"\.\d+\.", ".*.", name))


def _check_complete(model: Any, styles: dict[str, str]) -> None:
    """Raise UserError if the plan has other styles, or leaves out a parameter beside layers that it splits."""
    unknown = sorted({*styles.values()} - {*_SPLITS})
    beside = {name.rpartition(".")[0] for name in styles}
    for name, _ in model.base_model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner not in styles and {owner, owner.rpartition(".")[0]} & beside:
            unknown.append(name)
    if unknown or not styles:
        what = unknown[0] if unknown else "anything"
        raise UserError(
            f"{FIELD}: `transformers` does not say how ranks share {what} of this {model.config.model_type} model; set it to 1"
        )


def _by_outputs(layer: nn.Linear, group: TensorGroup) -> None:
    """Each rank computes some of the outputs."""
    for parameter in layer.parameters():
        _keep_part(parameter, Part(group, 0))


def _by_inputs(layer: nn.Linear, group: TensorGroup) -> None:
    """Each rank has some of the inputs; all get the sum of the outputs."""
    _keep_part(layer.weight, Part(group, 1))

    def forward(states: Tensor) -> Tensor:
        outputs: Tensor = _Sum.apply(linear(states, layer.weight), group.processes)
        return outputs if layer.bias is None else outputs + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _of_each_head(norm: nn.Module, group: TensorGroup) -> None:
    """The module is whole, and each rank applies it to its own heads: the gradient is the sum of theirs."""
    for parameter in norm.parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(_summed, processes=group.processes))


def _sum_gradients(group: TensorGroup, _module: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Before the forward pass of a module: add up the gradient by its input, of which each rank has that through its own layers
    in the module. Once for all of them, as for queries, keys and values."""
    if "hidden_states" in options:
        return arguments, {**options, "hidden_states": _SumGradients.apply(options["hidden_states"], group.processes)}
    return (_SumGradients.apply(arguments[0], group.processes), *arguments[1:]), options


_BY_OUTPUTS = "colwise"
_OF_EACH_HEAD = "replicated_with_grad_allreduce"
_SPLITS: dict[str, Callable[[Any, TensorGroup], None]] = {
    _BY_OUTPUTS: _by_outputs,
    "rowwise": _by_inputs,
    _OF_EACH_HEAD: _of_each_head,
}
"""By their names in plans of ``transformers``."""


def _keep_part(parameter: Any, part: Part) -> None:
    parameter.data = part.of(parameter.data).clone(memory_format=torch.contiguous_format)
    parameter.tensor_part = part
    parameter.tensor_model_parallel = True  # for DeepSpeed, which adds up the norms of these over the ranks


def _summed(tensor: Tensor, processes: Any) -> Tensor:
    """The sum over the ranks. Not in place: selective checkpointing keeps products of matrices, and would find them changed."""
    summed = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=processes)
    return summed


class _Sum(torch.autograd.Function):
    """The sum over the ranks; each of these has the whole gradient by it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Any) -> Tensor:
        return _summed(tensor, processes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    """The same numbers; the gradient by them is the sum of those of the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, processes: Any) -> Tensor:
        ctx.processes = processes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(gradients[0], ctx.processes), None
