"""What the stages of a recipe compute, from its sections: rows, tokens and steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import TrainingConfig

PAIRS = ("dpo", "iterative_dpo", "reward_model")
"""Sections whose rows have two sequences."""
ALL_COMPLETIONS = ("conditional_sft",)
"""Sections that train on all completions of a prompt; others take the best one, or a pair."""
WITH_REFERENCE = ("dpo", "iterative_dpo", "kto")
"""Sections whose loss compares with log-probabilities of a reference, which are computed once before the first step."""


@dataclass(frozen=True)
class Lengths:
    """Mean numbers of tokens, as given on the command line; None: the maximum that the recipe allows."""

    prompt: int | None = None
    completion: int | None = None
    row: int | None = None
    rows: int | None = None
    """Rows of the data of stages that train on fixed rows; None: unknown, so that their number of steps is, too."""


@dataclass(frozen=True)
class Training:
    """A stage that trains on fixed rows."""

    name: str
    training: TrainingConfig
    sequences: int
    """Sequences of a row."""
    tokens: int
    """Tokens of a sequence."""
    rows: int | None
    has_reference: bool

    @property
    def steps(self) -> int | None:
        """Optimiser steps; None if the number of rows is unknown."""
        of_rows = None
        if self.rows is not None:
            of_rows = math.ceil(self.training.num_train_epochs * math.ceil(self.rows / self.training.batch_size))
        limits = [limit for limit in (of_rows, self.training.max_steps) if limit is not None]
        return min(limits) if limits else None


@dataclass(frozen=True)
class Sampling:
    """A stage that samples."""

    name: str
    prompts: int
    prompt: int
    completion: int
    generation: GenerationConfig

    @property
    def completions(self) -> int:
        return self.prompts * self.generation.num_generations


@dataclass(frozen=True)
class Reinforcement:
    """A stage of reinforcement learning."""

    name: str
    section: RlConfig
    prompt: int
    completion: int

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.section.prompts_per_step * self.section.generation.num_generations


Work = Training | Sampling | Reinforcement


def work_of(recipe: BaseRecipe, lengths: Lengths) -> list[Work]:
    """The stages that take GPUs, in the order of the recipe's fields; evaluations are left out."""
    return list(_of_sections(recipe, lengths))


def _of_sections(recipe: BaseRecipe, lengths: Lengths) -> Iterator[Work]:
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        if isinstance(section, RlConfig):
            yield Reinforcement(name, section, *_lengths(section.prompts, section.generation, lengths))
            continue
        training = getattr(section, "training", None)
        generation = getattr(section, "generation", None)
        prompts = getattr(section, "prompts", None)
        rows = _rows(getattr(section, "data", None)) or lengths.rows
        if name != "evaluation" and isinstance(generation, GenerationConfig) and isinstance(prompts, DataConfig):
            count = getattr(section, "prompts_per_round", None) or _rows(prompts) or lengths.rows
            rounds = getattr(section, "rounds", 1)
            if count:
                rows = count * rounds
                yield Sampling(name, rows, *_lengths(prompts, generation, lengths), generation)
                rows *= generation.num_generations if name in ALL_COMPLETIONS else 1
        has_rows = prompts is not None or getattr(section, "data", None) is not None
        if isinstance(training, TrainingConfig) and has_rows:  # otherwise the model exists already
            yield Training(
                name=name,
                training=training,
                sequences=2 if name in PAIRS else 1,
                tokens=lengths.row or _row_length(section, lengths),
                rows=rows,
                has_reference=name in WITH_REFERENCE,
            )


def _rows(data: Any) -> int | None:
    """Rows that all sources of a data set are limited to; None if one is taken whole."""
    if not isinstance(data, DataConfig):
        return None
    counts = [source.rows for source in data.sources]
    return None if None in counts else sum(count for count in counts if count is not None) or None


def _lengths(prompts: DataConfig, generation: GenerationConfig, lengths: Lengths) -> tuple[int, int]:
    prompt = lengths.prompt or prompts.max_prompt_length or prompts.max_length
    return prompt, lengths.completion or generation.max_completion_length


def _row_length(section: Any, lengths: Lengths) -> int:
    data = getattr(section, "data", None)
    if isinstance(data, DataConfig):
        return data.max_length
    return sum(_lengths(section.prompts, section.generation, lengths))
