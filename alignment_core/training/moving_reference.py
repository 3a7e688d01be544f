"""A reference that follows the policy in training: a copy of its own on each rank, mixed with the policy every so often."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from alignment_core.files import write_whole
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models.microbatch import MicroBatch
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.training.learner import Learner

REFERENCE = "reference.safetensors"
"""In a checkpoint: the weights of a reference that has moved."""


class MovingReference:
    """``reference ← mixup · policy + (1 - mixup) · reference`` after every ``every`` steps; with a ``mixup`` of 1 the policy as
    it is. Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment"."""

    def __init__(self, packed: PackedModel, learner: Learner, every: int, mixup: float = 1.0) -> None:
        """``packed``: the reference as it starts. The ``learner`` trains the policy, all of whose weights it can be given."""
        self.packed, self.learner, self.every, self.mixup = packed, learner, every, mixup

    def logps_of(self, micro: MicroBatch) -> torch.Tensor:
        """Summed log-probabilities of the sequences of a micro-batch in nats [S], without a gradient."""
        with torch.no_grad():
            return sum_by_sequence(run_packed(self.packed, micro), micro.sequence_K, micro.sequences)

    def after(self, step: int) -> None:
        """Take note of a step that is done. On every rank, and collective where each holds a part of the policy."""
        if step % self.every:
            return
        live = dict(self.learner.packed.model.named_parameters())
        for name, reference in self.packed.model.named_parameters():
            whole: Any = nullcontext()
            if self.learner.zero_stage == 3:
                import deepspeed

                whole = deepspeed.zero.GatheredParameters([live[name]])
            with whole, torch.no_grad():
                if self.mixup == 1:
                    reference.copy_(live[name])
                else:
                    reference.lerp_(live[name], self.mixup)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, which holds no reference if that had not moved."""
        if not (checkpoint / REFERENCE).is_file():
            return
        weights = load_file(checkpoint / REFERENCE)
        with torch.no_grad():
            for name, reference in self.packed.model.named_parameters():
                reference.copy_(weights[name])

    def save(self, checkpoint: Path, step: int) -> None:
        """Write it into a checkpoint of this step, once it has moved."""
        if step >= self.every:
            weights = {name: one.detach().cpu().contiguous() for name, one in self.packed.model.named_parameters()}
            write_whole(checkpoint / REFERENCE, lambda file: file.write(save(weights)))
