"""A reference model that follows the policy in training: a copy on each rank, mixed with the policy every N steps."""

from __future__ import annotations

from pathlib import Path

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
        of_policy = _shapes(learner.packed)
        of_reference = _shapes(packed)
        names = {*of_policy, *of_reference}
        if different := sorted(name for name in names if of_policy.get(name) != of_reference.get(name)):
            name = different[0]
            raise UserError(
                "a reference that follows the policy gets its weights, but this one has another architecture "
                f"({name}: {_described(of_reference.get(name))}, the policy's {_described(of_policy.get(name))}): give a model "
                "of the policy's architecture, or keep the reference fixed"
            )
        self.weights = {name: parameter.detach() for name, parameter in packed.model.named_parameters()}
        """The reference's weights, in fp32 if they are mixed: in bf16 a small step towards the policy would be rounded away."""
        if mixup < 1:
            self.weights = {name: weights.float() for name, weights in self.weights.items()}

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
            weights = {name: tensor.cpu().contiguous() for name, tensor in self.weights.items()}
            write_whole(checkpoint / REFERENCE, lambda file: file.write(save(weights)))


def _shapes(packed: PackedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole parameters, of which this rank may hold a part, by name."""
    parameters = packed.model.named_parameters()
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters}


def _described(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " × ".join(map(str, shape))
