"""A frozen language model on every rank that gives its likeliest tokens in place of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from alignment_core.cluster.device import Device
from alignment_core.memory import memory_explained
from alignment_core.models.microbatch import Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import load_frozen, run_packed
from alignment_core.recipes import ResourcesConfig

Prediction = tuple[np.ndarray, np.ndarray]
"""Token ids (int32) and their log-probabilities in nats (float32), each [targets, C]."""


@dataclass(frozen=True)
class TeacherJob:
    """The model and the number of tokens: plain data that travels to every rank."""

    model: Model
    top_k: int
    bf16: bool
    embeddings: int | None = None
    """The number of tokens that the student has embeddings for; None: all of the tokenizer's."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int = 0, world: int = 1) -> Teacher:
        """The teacher of one rank; ranks are independent."""
        return Teacher(self, resources, device)


class Teacher:
    """Computes the rows of its rank alone.

    Rows of its head beyond the tokenizer's tokens, which only pad the vocabulary, and beyond the student's embeddings, which
    lack the images' token of Gemma 3 at 1B, are no candidates and have no probability.
    """

    def __init__(self, job: TeacherJob, resources: ResourcesConfig, device: Device) -> None:
        self.token_budget = resources.token_budget
        self.device = device
        dtype = torch.bfloat16 if job.bf16 else torch.float32
        with memory_explained(self.token_budget):
            share_prefixes = resources.attention == "auto"
            self.packed = load_frozen(job.model, "lm", dtype, device.torch_device, share_prefixes)
        self.packed.top = job.top_k
        tokens = max(job.model.tokenizer().get_vocab().values()) + 1
        self.packed.vocabulary.tokens = tokens if job.embeddings is None else min(tokens, job.embeddings)

    def run(self, rows: Sequence[Row]) -> list[Prediction]:
        """For each row of one sequence the likeliest tokens of each target, the most likely first."""
        predictions: dict[int, Prediction] = {}
        for part in cut(rows, 1, self.token_budget, self.packed.shares_prefixes)[0]:
            if not part:
                continue
            micro = pack(part, self.device.torch_device, self.packed.shares_prefixes)
            with torch.no_grad():
                ids_KC, logps_KC = run_packed(self.packed, micro).cpu().numpy()
            ends = np.cumsum([int(row.sequences[0].targets.sum()) for row in part])[:-1]
            pieces = zip(np.split(ids_KC.astype(np.int32), ends), np.split(logps_KC, ends), strict=True)
            predictions |= {row.number: piece for row, piece in zip(part, pieces, strict=True)}
        return [predictions[row.number] for row in rows]
