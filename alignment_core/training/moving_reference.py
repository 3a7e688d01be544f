"""A reference that follows the policy in training: a copy of its own on each rank, mixed with the policy every so often."""

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
from alignment_core.training.ema import full_fp32, whole_parameter
from alignment_core.training.learner import Learner

REFERENCE = "reference.safetensors"
"""In a checkpoint: the weights of a reference that has moved."""


class MovingReference:
    """``reference ← mixup · policy + (1 - mixup) · reference`` after every ``every`` steps; with a ``mixup`` of 1 the policy as
    it is. Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment"."""

    def __init__(self, packed: PackedModel, learner: Learner, every: int, mixup: float = 1.0) -> None:
        """``packed``: the reference as it starts. The ``learner`` trains the policy, all of whose weights it can be given.

        Raises UserError if the reference has other weights than the policy.
        """
        self.packed, self.learner, self.every, self.mixup = packed, learner, every, mixup
        shapes, own = ({n: _shape(p) for n, p in one.model.named_parameters()} for one in (learner.packed, packed))
        if other := sorted(name for name in {*shapes, *own} if shapes.get(name) != own.get(name)):
            raise UserError(
                "a reference that follows the policy takes over its weights, and this one has another architecture "
                f"({other[0]}: {_described(own.get(other[0]))}, the policy's {_described(shapes.get(other[0]))}): give a model "
                "of the policy's architecture, or let the reference stay as it is"
            )
        self.weights = {name: one.detach() for name, one in packed.model.named_parameters()}
        """What is mixed, in fp32: in bf16 a small part of the way to the policy would be rounded away."""
        if mixup < 1:
            self.weights = {name: one.float() for name, one in self.weights.items()}

    def logps_of(self, micro: MicroBatch) -> torch.Tensor:
        """Summed log-probabilities of the sequences of a micro-batch in nats [S], without a gradient."""
        with torch.no_grad():
            return sum_by_sequence(run_packed(self.packed, micro), micro.sequence_K, micro.sequences)

    def after(self, step: int) -> None:
        """Take note of a step that is done. On every rank, and collective where each holds a part of the policy."""
        if step % self.every:
            return
        live = dict(self.learner.packed.model.named_parameters())
        master = full_fp32(self.learner.engine, self.learner.zero_stage)
        with torch.no_grad():
            for name, weights in self.weights.items():
                if self.mixup == 1:
                    with whole_parameter(live[name], self.learner.zero_stage):
                        weights.copy_(live[name])
                else:
                    weights.lerp_(master(live[name]).to(weights.device), self.mixup)
        self._show()

    def _show(self) -> None:
        """Let the reference compute with what was mixed, in its own type."""
        with torch.no_grad():
            for name, reference in self.packed.model.named_parameters():
                reference.copy_(self.weights[name])

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, which holds no reference if that had not moved."""
        if not (checkpoint / REFERENCE).is_file():
            return
        stored = load_file(checkpoint / REFERENCE)
        for name, weights in self.weights.items():
            weights.copy_(stored[name])
        self._show()

    def save(self, checkpoint: Path, step: int) -> None:
        """Write it into a checkpoint of this step, once it has moved."""
        if step >= self.every:
            weights = {name: one.cpu().contiguous() for name, one in self.weights.items()}
            write_whole(checkpoint / REFERENCE, lambda file: file.write(save(weights)))


def _shape(parameter: Any) -> tuple[int, ...]:
    """Of all of it, also where this rank holds a part."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _described(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " × ".join(map(str, shape))
