"""Known traps: settings that are valid, and fail with real models, most of them silently. Each warning names its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from alignment_core.evaluation import gates
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.base import Config
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.preference import DpoLossConfig, learning_rate
from alignment_core.recipes.sections.rejection_sampling import RejectionSamplingConfig
from alignment_core.recipes.sections.rl import RlConfig

FAR = 10
"""A learning rate of more than this many times the method's default is a warning."""
OPTIMISED = ("reward", "win_rate")
"""Metrics of an evaluation by the reward model."""


def warnings(recipe: BaseRecipe) -> list[str]:
    """Warnings about a recipe before it runs, its variants and branches included: about gates, and traps in sections."""
    found = [*gates.warnings(recipe), *_judged_by_what_it_optimises(recipe)]
    for path, section, owner in _sections(recipe):
        if isinstance(section, TrainingConfig) and recipe.model.scratch is None:
            found += _learning_rate(path, section, owner)
        if isinstance(section, DpoLossConfig):
            found += _simpo(path, section)
        if isinstance(section, RlConfig):
            found += _without_kl(path, section)
        if isinstance(section, RejectionSamplingConfig):
            found += _wrong_answers(path, section)
    for group in ("recipes", "variants"):
        parts: Mapping[str, BaseRecipe] = getattr(recipe, group, {})
        for name, part in parts.items():
            own = warnings(part.model_copy(update={"promotion": None}))  # the whole is promoted
            where = f"branches.{name}." if group == "recipes" else f"{name}: "
            found += [f"{where}{sentence}" for sentence in own if sentence not in found]  # not of what they share
    return found


def _sections(section: Config, path: str = "") -> Iterator[tuple[str, Config, Config]]:
    """All sections below one, with their path and the section that holds each."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        inner = f"{path}.{name}" if path else name
        numbered = enumerate(value) if isinstance(value, tuple) else ()
        for place, item in [(inner, value), *((f"{inner}.{number}", item) for number, item in numbered)]:
            if isinstance(item, Config):
                yield place, item, section
                yield from _sections(item, place)


def _learning_rate(path: str, training: TrainingConfig, owner: Config) -> Iterator[str]:
    default = type(owner).model_fields[path.rpartition(".")[2]].get_default()
    usual = (default if isinstance(default, TrainingConfig) else TrainingConfig()).learning_rate
    usual = learning_rate(getattr(owner, "loss", None), usual)
    if training.lora is not None and training.learning_rate <= usual:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is a rate for training all weights; adapters need about ten "
            f"times as much, such as {10 * usual:g} (Schulman et al. 2025, LoRA Without Regret)"
        )
    if training.lora is None and round(training.learning_rate / usual) > FAR and usual < 1e-5:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is {training.learning_rate / usual:.0f} times the default of "
            f"{usual:g}; published recipes for pretrained models have 5e-7 to 1e-5 (docs/fields.md)"
        )


def _simpo(path: str, loss: DpoLossConfig) -> Iterator[str]:
    if "simpo" in loss.weights and loss.beta < 1:
        yield (
            f"{path}.beta: {loss.beta:g} is DPO's; SimPO's rewards are means per token and need 2 to 2.5, or up to 10 (Meng et "
            "al. 2024)"
        )


def _without_kl(path: str, rl: RlConfig) -> Iterator[str]:
    learned = [reward for reward in rl.rewards if getattr(reward, "reward_model", None) is not None]
    if learned and rl.kl.coefficient == 0:
        yield (
            f"{path}.kl.coefficient: 0 with a reward model lets the policy drift to whatever the model overrates (Gao et al. "
            "2023, Scaling Laws for Reward Model Overoptimization): 0.01 to 0.05 is usual"
        )


def _wrong_answers(path: str, section: RejectionSamplingConfig) -> Iterator[str]:
    selection = section.selection
    if selection.score == "verifier" and selection.strategy != "threshold" and selection.min_score is None:
        yield (
            f"{path}.selection.min_score: unset, so the best answer of a prompt is trained on even if the verifier finds it "
            "wrong; set it to the score of a right answer, such as 1"
        )


def _judged_by_what_it_optimises(recipe: BaseRecipe) -> Iterator[str]:
    """A promotion that only the reward model decides that the policy was trained against."""
    chosen = recipe.promotion.gates if recipe.promotion else ()
    judges = recipe.evaluation.rewards if recipe.evaluation else ()
    optimises = any(
        _by_our_reward_model(section)
        for name in ("rl", "iterative_dpo", "rejection_sampling")
        if (section := getattr(recipe, name, None)) is not None
    )
    if chosen and optimises and all(map(_is_ours, judges)) and all(gate.measures in OPTIMISED for gate in chosen):
        yield (
            "promotion.gates: all are judged by the reward model that the policy was trained against, and which also rises "
            "when the policy gets worse (Gao et al. 2023): add a verifier, or another reward model in `evaluation.rewards`"
        )


def _by_our_reward_model(section: Any) -> bool:
    """Whether a section trains on the recipe's own reward model."""
    by_default = not section.rewards and getattr(getattr(section, "selection", None), "score", None) == "reward"
    return by_default or any(map(_is_ours, section.rewards))


def _is_ours(reward: Config) -> bool:
    return getattr(reward, "reward_model", None) == "ours"
