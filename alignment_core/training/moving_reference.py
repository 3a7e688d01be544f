"""A reference model that follows the policy in training: mixed with the policy every N steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from alignment_core.errors import UserError
from alignment_core.files import write_whole
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models.microbatch import MicroBatch
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.tensor_parallel import gathered, own
from alignment_core.training.ema import full_fp32, part_fp32
from alignment_core.training.frozen import FrozenModel
from alignment_core.training.learner import Learner

REFERENCE = "reference.safetensors"
"""File in a checkpoint with the weights of a reference that has moved."""


class MovingReference:
    """``reference ← mixup · policy + (1 - mixup) · reference`` after every ``every`` steps; with a ``mixup`` of 1 a copy of the
    policy. Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment"."""

    def __init__(self, frozen: FrozenModel, learner: Learner, every: int, mixup: float = 1.0) -> None:
        """``frozen``: the initial reference, at the ZeRO stage of the ``learner``, which trains the policy.

        Raises UserError if the reference has other weights than the policy.
        """
        self.frozen = frozen
        self.learner = learner
        self.every = every
        self.mixup = mixup
        of_policy = _shapes(learner.packed)
        self.shapes = _shapes(frozen.packed)
        """Shapes of the whole weights of the reference, by name."""
        names = {*of_policy, *self.shapes}
        if different := sorted(name for name in names if of_policy.get(name) != self.shapes.get(name)):
            name = different[0]
            raise UserError(
                "a reference that follows the policy gets its weights, but this one has another architecture "
                f"({name}: {_described(self.shapes.get(name))}, the policy's {_described(of_policy.get(name))}): give a model "
                "of the policy's architecture, or keep the reference fixed"
            )
        self.weights = frozen.weights()
        """The reference's weights, or this rank's parts, in fp32 if they are mixed: in bf16 a small step towards the policy
        would be rounded away."""
        if mixup < 1:
            self.weights = {name: weights.float() for name, weights in self.weights.items()}

    def logps_of(self, micro: MicroBatch) -> torch.Tensor:
        """Summed log-probabilities of the sequences of a micro-batch in nats [S], without a gradient."""
        with torch.no_grad():
            return sum_by_sequence(run_packed(self.frozen.packed, micro), micro.sequence_K, micro.sequences)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Mix with the policy if it is due after ``step`` steps. Call it on every rank: it is collective under ZeRO."""
        if step % self.every:
            return
        live: dict[str, Any] = dict(self.learner.packed.model.named_parameters())
        master = full_fp32(self.learner.engine, self.learner.zero_stage)
        for name, weights in self.weights.items():
            parameter = live[name]
            if self.mixup == 1:
                weights.copy_(parameter.ds_tensor if self.frozen.is_sharded else parameter)
            elif not parameter.requires_grad:  # the optimiser does not hold it
                source = parameter.ds_tensor if self.frozen.is_sharded else parameter
                weights.lerp_(source.to(weights.device, weights.dtype), self.mixup)
            else:
                source = part_fp32(self.learner.engine, parameter) if self.frozen.is_sharded else master(parameter)
                weights.lerp_(source.to(weights.device), self.mixup)
        self.frozen.set_weights(self.weights)

    @torch.no_grad()
    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint, which holds no reference if that had not moved."""
        if not (checkpoint / REFERENCE).is_file():
            return
        stored = load_file(checkpoint / REFERENCE)
        for name, weights in self.weights.items():
            whole = stored[name]
            if self.frozen.is_sharded:
                at = weights.numel() * self.learner.rank
                part = whole.flatten()[at : at + weights.numel()]  # DeepSpeed pads the last one
                weights[: part.numel()] = part.to(weights.device)
            else:
                weights.copy_(own(self.frozen.parameter(name), whole))
        self.frozen.set_weights(self.weights)

    def save(self, checkpoint: Path, step: int) -> None:
        """Write the reference into a checkpoint of this step, if it has moved. Collective; rank 0 writes."""
        if step < self.every:
            return
        whole = {name: self._whole(name).cpu().contiguous() for name in self.weights}
        if self.learner.rank == 0:
            write_whole(checkpoint / REFERENCE, lambda file: file.write(save(whole)))

    def _whole(self, name: str) -> torch.Tensor:
        """A weight of the reference, gathered from all ranks."""
        weights, shape = self.weights[name], torch.Size(self.shapes[name])
        if not self.frozen.is_sharded:
            return gathered(self.frozen.parameter(name), weights)
        weights = weights.to(self.frozen.device)  # NCCL gathers nothing from CPU memory, to which they may be offloaded
        parts = weights.new_empty(self.learner.world * weights.numel())
        torch.distributed.all_gather_into_tensor(parts, weights)
        return parts[: shape.numel()].view(shape)


def _shapes(packed: PackedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name: of the whole ones with ZeRO 3, and of this rank's parts if ranks share layers."""
    parameters = packed.model.named_parameters()
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters}


def _described(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " × ".join(map(str, shape))
