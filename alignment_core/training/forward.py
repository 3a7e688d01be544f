"""Forward passes without training: log-probabilities or scores of given sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from alignment_core.cluster.device import Device
from alignment_core.errors import EnvironmentFault, OutOfMemory
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.memory import memory_explained
from alignment_core.models.loading import Head
from alignment_core.models.microbatch import Images, Pair, Row, Tokens, TokenSequence
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import run_packed
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.frozen import FrozenModel


@dataclass(frozen=True)
class ForwardJob:
    """The model: plain data that travels to every rank."""

    model: Model
    head: Head
    bf16: bool | None = None
    """Whether it computes in bfloat16; None: if it is stored in half precision, and
    the device has instructions for it."""
    verdicts: tuple[int, int] | None = None
    """For a judge: the tokens of the good and the bad verdict."""
    temperature: float = 1.0
    """Temperature of a language model's distribution over tokens, softmax(logits / temperature)."""
    context: int | None = None
    """Tokens of the longest sequence that an engine sampled; see :class:`~alignment_core.models.rope.RopeLengths`."""
    has_images: bool = True
    """Whether sequences may have images; see :class:`~alignment_core.models.packed.PackedModel`."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int = 0, world: int = 1) -> Forward:
        """The model of one rank."""
        return Forward(self, resources, device, rank, world)


class Forward:
    """A frozen model with packed, batched forward passes. Ranks are independent unless they compute it together."""

    def __init__(
        self, job: ForwardJob, resources: ResourcesConfig, device: Device, rank: int = 0, world: int = 1
    ) -> None:
        self.job = job
        bf16 = device.inference_dtype(job.model.dtype) != "float32" if job.bf16 is None else job.bf16
        dtype = torch.bfloat16 if bf16 else torch.float32
        try:
            with memory_explained(resources.token_budget):
                self.frozen = FrozenModel(
                    job.model,
                    job.head,
                    dtype,
                    resources,
                    device,
                    rank,
                    world,
                    context=job.context,
                    has_images=job.has_images,
                )
        except OutOfMemory as error:  # smaller micro-batches would not help
            shares_layers = resources.trainer_tensor_parallel_size > 1
            setting = "a larger resources.trainer_tensor_parallel_size" if shares_layers else "resources.zero_stage: 3"
            part = "a smaller part" if shares_layers else "a part"
            raise EnvironmentFault(
                f"{job.model.reference.short} does not fit into the memory of one device: set {setting}, so that each holds "
                f"{part} of it, or use more devices or devices with more memory"
            ) from error
        config = self.frozen.packed.model.config.get_text_config()
        self.pad_token_id: int | None = getattr(config, "pad_token_id", None)
        self._computed = 0

    def run(self, pairs: Sequence[Pair]) -> np.ndarray:
        """For each (prompt ids, completion ids): its score, or the summed log-probability of the completion in nats; of a
        judge, the log-odds of its good verdict after the completion. With ids of what follows, log-probabilities are those
        within the whole sequence, on whose length rotary frequencies may depend.

        Returns [len(pairs)] float32, in the order of ``pairs``; of a model that ranks compute together, this rank's values, and
        0 where other ranks compute or have the same.
        """
        rows = [Row(number, (self._sequence(*pair),)) for number, pair in enumerate(pairs)]
        values = np.zeros(len(rows), np.float32)
        for micro in self.frozen.packs(rows):
            with torch.no_grad():
                output = run_packed(self.frozen.packed, micro, self.job.temperature)
                if not (micro.rows and self.frozen.group.is_first):
                    continue
                self._computed += micro.input_ids.numel()
                if self.job.verdicts:
                    output = output[:, 1] - output[:, 2]
                elif self.job.head == "lm":
                    output = sum_by_sequence(output, micro.sequence_K, micro.sequences)
            values[[row.number for row in micro.rows]] = output.float().cpu().numpy()
        return values

    def computed(self) -> int:
        """Tokens that this rank has computed: those that sequences share once, and the padding of lines."""
        return self._computed

    def close(self) -> None:
        """Free the model's memory."""
        self.frozen.close()

    def _sequence(self, prompt: Tokens, completion: Tokens, *more: Any) -> TokenSequence:
        if more and isinstance(more[-1], Images):
            sequence = self._sequence(prompt, completion, *more[:-1])
            return replace(sequence, images=tuple(map(str, more[-1])))
        return self._of_ids(prompt, completion, *more)

    def _of_ids(self, prompt: Tokens, completion: Tokens, following: Tokens = ()) -> TokenSequence:
        if self.job.verdicts is not None:
            sequence = TokenSequence.of_prompt_and_completion(_joined(prompt, completion), self.job.verdicts[:1])
            return replace(sequence, candidates=np.asarray([self.job.verdicts], np.int64))
        sequence = TokenSequence.of_prompt_and_completion(prompt, _joined(completion, following))
        if self.job.head == "score":
            return sequence.without_padding(self.pad_token_id)
        targets = sequence.targets & (np.arange(len(sequence.ids)) < len(prompt) + len(completion))
        return replace(sequence, targets=targets)


def _joined(first: Tokens, second: Tokens) -> np.ndarray:
    return np.concatenate([np.asarray(first, np.int64), np.asarray(second, np.int64)])
