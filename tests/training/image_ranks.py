"""Processes that train a tiny image-text model under DeepSpeed; started by test_image_ranks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence, cut
from alignment_core.models.packed import run_packed
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.frozen import FrozenModel
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.step_report import StepReport
from tests.training.sharded_ranks import DEVICE, model_at

STEPS = 3
RATE = 1e-2
TARGETS = 16.0
BUDGET = 40
"""Tokens of a micro-batch."""
GATHERED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Settings of DeepSpeed without which such small weights stay whole on every rank."""
Texts = list[tuple[list[int], int, list[str]]]
"""Ids, how many of them are the prompt, and paths of images."""


def rows_of(texts: Texts) -> list[Row]:
    rows = []
    for number, (ids, prompt, images) in enumerate(texts):
        sequence = TokenSequence.of_prompt_and_completion(ids[:prompt], ids[prompt:])
        rows.append(Row(number, (replace(sequence, images=tuple(images)),)))
    return rows


def images_of_packs(texts: Texts, world: int) -> list[list[int]]:
    """For each rank how many images each of its micro-batches has."""
    packs = cut(rows_of(texts), world, BUDGET, share_prefixes=False)
    return [[sum(len(row.sequences[0].images) for row in pack) for pack in of_rank] for of_rank in packs]


def _loss(output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -output.sum() if micro.rows else 0.0 * output.sum()
    return loss, {"loss": loss.detach()}


def steps(rank: int, world: int, path: str, texts: Texts, stage: int, training: dict[str, Any], folder: str) -> Any:
    """Losses over all ranks of three steps; the model is saved below ``folder`` after them. After two steps a checkpoint is
    written, with which another learner takes the third step, too: last is whether its loss is equal."""
    resources = ResourcesConfig(trainers=world, zero_stage=stage, threads=1, max_tokens_per_microbatch=BUDGET)
    if stage == 3:
        resources = resources.model_copy(update={"deepspeed": GATHERED})
    has_images = any(images for *_, images in texts)
    source = ModelSource(model_at(path), "lm", adapter_seed=6, has_images=has_images)
    config = TrainingConfig(learning_rate=RATE, max_grad_norm=1e6, adam_epsilon=1e-3, **training)
    learner = Learner(source, config, resources, DEVICE, rank, world)
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            learner.save(Path(folder, "checkpoint"))
        losses.append(_step(learner, texts))
    learner.export(Path(folder, "trained"))
    learner.close()
    again = Learner(source, config, resources, DEVICE, rank, world)
    again.restore(Path(folder, "checkpoint"), STEPS - 1)
    resumed = _step(again, texts)
    again.close()
    return [losses, resumed == losses[-1]]


def logps(rank: int, world: int, path: str, texts: Texts) -> dict[int, float]:
    """The log-probabilities of this rank's completions at ZeRO 3, by row, of a model that is not trained; in nats."""
    resources = ResourcesConfig(trainers=world, zero_stage=3, threads=1, max_tokens_per_microbatch=BUDGET)
    resources = resources.model_copy(update={"deepspeed": GATHERED})
    frozen = FrozenModel(model_at(path), "lm", torch.float32, resources, DEVICE, rank, world)
    values: dict[int, float] = {}
    for micro in frozen.packs(rows_of(texts)):
        with torch.no_grad():
            output = run_packed(frozen.packed, micro)
        sums = sum_by_sequence(output, micro.sequence_K, micro.sequences)
        values |= {row.number: float(value) for row, value in zip(micro.rows, sums, strict=False)}
    frozen.close()
    return values


def _step(learner: Learner, texts: Texts) -> float:
    report = StepReport()
    learner.step([Term(rows_of(texts), _loss, TARGETS, report)], RATE)
    summed = torch.tensor(report.sums["loss"], dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    return float(summed) / TARGETS


def masters(rank: int, world: int, path: str, texts: Texts, folder: str) -> Any:
    """Names of the fp32 master weights that a training in bf16 writes beside the model in ``folder``; another training starts
    from them, with the vision tower."""
    resources = ResourcesConfig(trainers=world, zero_stage=0, threads=1)
    config = TrainingConfig(learning_rate=RATE, bf16=True)
    learner = Learner(ModelSource(model_at(path), "lm"), config, resources, DEVICE, rank, world)
    _step(learner, texts)
    trained, beside = Path(folder, "trained"), Path(folder, "masters")
    learner.export(trained, masters=beside)
    learner.close()
    config = config.model_copy(update={"train_vision_tower": True})
    learner = Learner(ModelSource(model_at(str(trained)), "lm", masters=beside), config, resources, DEVICE, rank, world)
    _step(learner, texts)
    learner.close()
    return sorted(name for file in beside.glob("*.safetensors") for name in load_file(file))
