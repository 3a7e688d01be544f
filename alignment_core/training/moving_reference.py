"""A reference model that follows the policy in training: a copy on each rank, mixed with the policy every N steps."""

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
"""File in a checkpoint with the weights of a reference that has moved."""


class MovingReference:
    """``reference ← mixup · policy + (1 - mixup) · reference`` after every ``every`` steps; with a ``mixup`` of 1 a copy of the
    policy. Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment"."""

    def __init__(self, packed: PackedModel, learner: Learner, every: int, mixup: float = 1.0) -> None:
        """``packed``: the initial reference. The ``learner`` trains the policy.

        Raises UserError if the reference has other weights than the policy.
        """
        self.packed = packed
        self.learner = learner
        self.every = every
        self.mixup = mixup
        shapes, own = ({n: _shape(p) for n, p in one.model.named_parameters()} for one in (learner.packed, packed))
        if other := sorted(name for name in {*shapes, *own} if shapes.get(name) != own.get(name)):
            raise UserError(
                "a reference that follows the policy gets its weights, but this one has another architecture "
                f"({other[0]}: {_described(own.get(other[0]))}, the policy's {_described(shapes.get(other[0]))}): give a model "
                "of the policy's architecture, or keep the reference fixed"
            )
        self.weights = {name: one.detach() for name, one in packed.model.named_parameters()}
        """The reference's weights, in fp32 if they are mixed: in bf16 a small step towards the policy would be rounded away."""
        if mixup < 1:
            self.weights = {name: one.float() for name, one in self.weights.items()}

    def logps_of(self, micro: MicroBatch) -> torch.Tensor:
        """Summed log-probabilities of the sequences of a micro-batch in nats [S], without a gradient."""
        with torch.no_grad():
            return sum_by_sequence(run_packed(self.packed, micro), micro.sequence_K, micro.sequences)

    def after(self, step: int) -> None:
        """Mix with the policy if it is due after ``step`` steps. Call it on every rank: it is collective under ZeRO."""
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
        self._copy_to_model()

    def _copy_to_model(self) -> None:
        """Copy the mixed weights into the model, in its own type."""
        with torch.no_grad():
            for name, reference in self.packed.model.named_parameters():
                reference.copy_(self.weights[name])

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint, which holds no reference if that had not moved."""
        if not (checkpoint / REFERENCE).is_file():
            return
        stored = load_file(checkpoint / REFERENCE)
        for name, weights in self.weights.items():
            weights.copy_(stored[name])
        self._copy_to_model()

    def save(self, checkpoint: Path, step: int) -> None:
        """Write the reference into a checkpoint of this step, if it has moved."""
        if step >= self.every:
            weights = {name: one.cpu().contiguous() for name, one in self.weights.items()}
            write_whole(checkpoint / REFERENCE, lambda file: file.write(save(weights)))


def _shape(parameter: Any) -> tuple[int, ...]:
    """Shape of the whole parameter, also where this rank holds a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _described(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " × ".join(map(str, shape))
