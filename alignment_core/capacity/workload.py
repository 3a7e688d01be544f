"""What the stages of a recipe compute, from its sections: rows, tokens and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.distillation import DistillationConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.preference import DpoLossConfig
from alignment_core.recipes.sections.rewards import RewardConfig, ours
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import TrainingConfig

PAIRS = ("dpo", "iterative_dpo", "reward_model")
"""Sections whose rows have two sequences."""
ALL_COMPLETIONS = ("conditional_sft",)
"""Sections that train on all completions of a prompt; others take the best one, or a pair."""
WITH_REFERENCE = ("dpo", "iterative_dpo", "kto")
"""Sections whose loss compares with log-probabilities of a reference, which are computed once before the first step unless the
reference follows the policy."""
LEARNED = ("reward_model", "process_reward_model")
"""Kinds of rewards that are models in actors of this project."""
SERVED = "served_judge"
"""The kind of reward that is a language model on a server of the stage."""


@dataclass(frozen=True)
class Lengths:
    """Mean numbers of tokens, as given on the command line; None: the maximum that the recipe allows."""

    prompt: int | None = None
    completion: int | None = None
    row: int | None = None
    rows: int | None = None
    """Rows of the data of stages that train on fixed rows; None: unknown, so that their number of steps is, too."""


@dataclass(frozen=True)
class Scorer:
    """A reward of completions."""

    field: str
    """Its place in the recipe."""
    reward: RewardConfig
    model: ModelConfig | None
    """The model that rewards; None for the recipe's own, which is trained from the policy's, and for rewards without one."""

    @property
    def kind(self) -> str:
        return self.reward.KEY


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
    """Whether a reference's log-probabilities of all rows are computed before the first step."""
    shared: int = 0
    """Tokens at the begin of a row's sequences that are the same: the prompt of a pair."""
    follows: bool = False
    """Whether a second model on the trainers, the reference that follows the policy, computes each step's rows."""
    passes: int = 0
    """Passes over a step's rows without gradient before the one of the loss."""
    teacher: ModelConfig | None = None
    """The model whose probabilities of all rows are computed before the first step."""
    notes: tuple[str, ...] = ()
    """Sentences about what is not counted."""

    def computed(self, shares_prefixes: bool) -> int:
        """Tokens of a row that are computed. ``shares_prefixes``: those that its sequences share, once."""
        return self.sequences * self.tokens - (self.sequences - 1) * (self.shared if shares_prefixes else 0)

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
    scorers: tuple[Scorer, ...] = ()
    """Rewards of the completions."""

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
    scorers: tuple[Scorer, ...] = ()
    """The section's rewards."""
    pretraining: int = 0
    """Tokens of a row of ``section.pretraining``."""

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.section.prompts_per_step * self.section.generation.num_generations


Work = Training | Sampling | Reinforcement


def work_of(recipe: BaseRecipe, lengths: Lengths) -> list[Work]:
    """The stages that take GPUs, in the order of the recipe's fields; evaluations are left out."""
    return list(_of_sections(recipe, lengths))


def models_of(works: Iterable[Work]) -> dict[str, ModelConfig]:
    """Models beside the policy, by their field in the recipe."""
    models: dict[str, ModelConfig | None] = {}
    for work in works:
        if isinstance(work, Training):
            models[f"{work.name}.teacher.model"] = work.teacher
        else:
            models |= {scorer.field: scorer.model for scorer in work.scorers}
        if isinstance(work, Reinforcement):
            models[f"{work.name}.kl.reference"] = work.section.kl.reference
    return {field: model for field, model in models.items() if model is not None}


def _of_sections(recipe: BaseRecipe, lengths: Lengths) -> Iterator[Work]:
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        if isinstance(section, RlConfig):
            texts = section.pretraining
            row = 0 if texts is None else lengths.row or texts.data.max_length
            scorers = _scorers(recipe, section.rewards, f"{name}.rewards")
            sizes = _lengths(section.prompts, section.generation, lengths)
            yield Reinforcement(name, section, *sizes, scorers, row)
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
                sizes = _lengths(prompts, generation, lengths)
                yield Sampling(name, rows, *sizes, generation, _scorers_of(recipe, name, section))
                rows *= generation.num_generations if name in ALL_COMPLETIONS else 1
        has_rows = prompts is not None or getattr(section, "data", None) is not None
        if isinstance(training, TrainingConfig) and has_rows:  # otherwise the model exists already
            yield _training(name, section, training, rows, lengths)


def _training(name: str, section: Any, training: TrainingConfig, rows: int | None, lengths: Lengths) -> Training:
    """A stage that trains on the rows, or the completions, of a section."""
    loss = getattr(section, "loss", None)
    follows = getattr(loss, "sync_ref_model", None) is not None
    compares = name in WITH_REFERENCE and getattr(loss, "needs_reference", True)
    beta_of_batch = isinstance(loss, DpoLossConfig) and loss.beta_alpha > 0
    estimates_kl = isinstance(loss, KtoLossConfig) and loss.loss_type == "kto"
    teacher = section.teacher.model if isinstance(section, DistillationConfig) else None
    notes = []
    if isinstance(section, DistillationConfig):
        uncounted = {"teacher.sft": section.teacher.sft, "on_policy": section.on_policy}
        notes = [f"{name}.{field}" for field, value in uncounted.items() if value is not None]
    tokens = lengths.row or _row_length(section, lengths)
    return Training(
        name=name,
        training=training,
        sequences=2 if name in PAIRS else 1,
        tokens=tokens,
        rows=rows,
        has_reference=compares and not follows,
        shared=min(tokens, _prompt_of_pair(section, lengths)) if name in PAIRS else 0,
        follows=follows,
        passes=int(beta_of_batch) + int(estimates_kl),
        teacher=teacher,
        notes=tuple(notes),
    )


def _scorers(recipe: BaseRecipe, rewards: Iterable[RewardConfig], field: str) -> tuple[Scorer, ...]:
    """The rewards at ``field``. The one of a section of the recipe is its model, if that exists already."""
    scorers = []
    for number, reward in enumerate(rewards):
        model = reward.model
        if model == "ours":
            model = getattr(getattr(recipe, reward.KEY, None), "model", None)
        scorers.append(Scorer(f"{field}.{number}", reward, model))
    return tuple(scorers)


def _scorers_of(recipe: BaseRecipe, name: str, section: Any) -> tuple[Scorer, ...]:
    """The rewards of a section's completions; by default the recipe's own reward model."""
    if attributes := getattr(section, "attributes", None):
        return tuple(
            replace(scorer, field=f"{name}.attributes.{attribute}.reward")
            for attribute, config in attributes.items()
            for scorer in _scorers(recipe, [config.reward], name)
        )
    ranked_by_reward = getattr(getattr(section, "selection", None), "score", "reward") == "reward"
    usual = (ours(),) if ranked_by_reward and getattr(recipe, "reward_model", None) else ()
    rewards = getattr(section, "rewards", ()) or usual
    return _scorers(recipe, rewards, f"{name}.rewards")


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


def _prompt_of_pair(section: Any, lengths: Lengths) -> int:
    """Tokens of the prompt of a pair. 0 if its length is unknown: any maximum would be no upper bound of the time."""
    if lengths.prompt or getattr(section, "data", None) is not None:
        return lengths.prompt or 0
    return _lengths(section.prompts, section.generation, lengths)[0]
