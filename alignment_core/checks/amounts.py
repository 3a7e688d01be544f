"""Warnings about the rows of data sets: many that are too long, and too few for training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment_core.checks import rows
from alignment_core.checks.traps import FEW_STEPS
from alignment_core.composition.plan import PlannedStage
from alignment_core.data.statistics import WARNING_SHARE
from alignment_core.training.schedule import whole_steps

TOO_LONG = ("too_long", "prompt_too_long")
"""Reasons for which rows are dropped because of their length."""


def warnings(todo: Sequence[PlannedStage], seen: Mapping[str, rows.Answer]) -> Iterator[str]:
    """Sentences about the data sets that were read, and about the stages that train on them."""
    for label, answer in seen.items():
        yield from _too_long(label, answer)
    for stage in todo:
        data = stage.inputs.get("data")
        if isinstance(data, PlannedStage) and data.label in seen:
            yield from _few_steps(stage, data, seen[data.label])


def _too_long(label: str, answer: rows.Answer) -> Iterator[str]:
    count = sum(answer.dropped.get(reason, 0) for reason in TOO_LONG) + answer.shortened
    if answer.read and count > WARNING_SHARE * answer.read:
        first = "" if answer.whole else "first "
        yield (
            f"{label}: {count} of the {first}{answer.read} rows ({count / answer.read:.0%}) are longer than max_length or "
            "max_prompt_length allow: the long answers that they lack are what a model then does not learn; raise it to the "
            f"95th percentile of your rows, so that no more than {WARNING_SHARE:.0%} are lost"
        )


def _few_steps(stage: PlannedStage, data: PlannedStage, answer: rows.Answer) -> Iterator[str]:
    config: Any = data.config
    training = getattr(stage.config, "training", None)
    weighted = any(source.source.weight is not None for source in config.sources)
    if training is None or training.max_steps is not None or not answer.whole or weighted or config.kind == "documents":
        return
    if _is_from_scratch(data.inputs.get("tokenizer")):  # their tasks are small
        return
    count = answer.trained - config.data.test_rows
    steps = whole_steps(training.num_train_epochs, math.ceil(count / training.batch_size))
    if 0 < steps < FEW_STEPS:
        yield (
            f"{stage.label}: {count} rows with a batch_size of {training.batch_size} and num_train_epochs "
            f"{training.num_train_epochs:g} are {steps} optimiser steps, too few to learn much: train for more epochs (LIMA, "
            "Zhou et al. 2023: 15 on 1,000 rows), or on smaller batches"
        )


def _is_from_scratch(model: Any) -> bool:
    if not isinstance(model, PlannedStage) or model.stage != "base_model":
        return False
    config: Any = model.config
    return config.model.scratch is not None
