"""A frozen language model on every rank that gives its likeliest tokens in place of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from alignment_core.cluster.device import Device
from alignment_core.memory import memory_explained
from alignment_core.models.microbatch import Images, Row
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import run_packed
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.frozen import FrozenModel

Prediction = tuple[np.ndarray, np.ndarray]
"""Of a row: token ids (int32) and their log-probabilities in nats (float32), each [targets, C]."""


@dataclass(frozen=True)
class TeacherJob:
    """The model and the number of tokens: plain data that travels to every rank."""

    model: Model
    top_k: int
    bf16: bool
    embeddings: int | None = None
    """The number of tokens that the student has embeddings for; None: all of the tokenizer's."""
    has_images: bool = True
    """Whether rows may have images; see :class:`~alignment_core.models.packed.PackedModel`."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int = 0, world: int = 1) -> Teacher:
        """The teacher of one rank."""
        return Teacher(self, resources, device, rank, world)


class Teacher:
    """Predicts the targets of given rows. Ranks are independent unless they compute it together.

    Rows of its head beyond the tokenizer's tokens, which only pad the vocabulary, and beyond the student's embeddings, which
    lack the images' token of Gemma 3 at 1B, are no candidates and have no probability.
    """

    def __init__(
        self, job: TeacherJob, resources: ResourcesConfig, device: Device, rank: int = 0, world: int = 1
    ) -> None:
        dtype = torch.bfloat16 if job.bf16 else torch.float32
        with memory_explained(resources.token_budget):
            self.frozen = FrozenModel(job.model, "lm", dtype, resources, device, rank, world, has_images=job.has_images)
        packed = self.frozen.packed
        packed.top = job.top_k
        tokens = max(job.model.tokenizer().get_vocab().values()) + 1
        packed.vocabulary.tokens = tokens if job.embeddings is None else min(tokens, job.embeddings)

    def run(self, rows: Sequence[Row], images: Sequence[Images] = ()) -> dict[int, Prediction]:
        """For each row of one sequence, by its number, the likeliest tokens of each target, the most likely first; if ranks
        compute together, for this rank's rows. ``images`` are those of each row, if any has some."""
        if images:
            rows = [_with_images(row, files) for row, files in zip(rows, images, strict=True)]
        predictions: dict[int, Prediction] = {}
        for micro in self.frozen.packs(rows):
            with torch.no_grad():
                output_2KC = run_packed(self.frozen.packed, micro)
            if micro.rows:
                ids_KC, logps_KC = output_2KC.cpu().numpy()
                ends = np.cumsum([int(row.sequences[0].targets.sum()) for row in micro.rows])[:-1]
                pieces = zip(np.split(ids_KC.astype(np.int32), ends), np.split(logps_KC, ends), strict=True)
                predictions |= {row.number: piece for row, piece in zip(micro.rows, pieces, strict=True)}
        return predictions

    def close(self) -> None:
        """Free the model's memory."""
        self.frozen.close()


def _with_images(row: Row, files: Images) -> Row:
    (sequence,) = row.sequences
    return replace(row, sequences=(replace(sequence, images=tuple(map(str, files))),))
